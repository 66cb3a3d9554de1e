// Scheduling: one warp of a cluster takes tickets, waits until the inputs of a task are there, and hands each CTA its
// tile, a task ahead of the one that is being multiplied.
#pragma once

#include "cuda/launch/persistent.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/stage/probe.cuh"
#include "cuda/stage/wait.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace weft {

// How a role takes the next task; whole warps or single lanes.
__device__ __forceinline__ TaskHead take_task(SharedTile& shared, const RingPosition<kTaskSlots>& slot) {
  ptx::mbarrier_wait_cluster(&shared.task_full[slot.index], slot.phase);
  return shared.tasks[slot.index];
}
// By one lane of the role, when nobody of it needs the slot any more.
__device__ __forceinline__ void release_task(SharedTile& shared, const RingPosition<kTaskSlots>& slot) {
  ptx::mbarrier_arrive_mapped(ptx::map_shared(&shared.task_empty[slot.index], 0));
}

// Tiles that raise the counter of a block, times the warps that each raise it once.
__device__ __forceinline__ uint32_t mid_target(const LayerShape& shape, Direction direction) {
  const TaskKind producer = direction == Direction::kForward ? TaskKind::kGateUp : TaskKind::kDownDgrad;
  const int32_t cols = producer == TaskKind::kGateUp ? kGateUpCols : kTileN;
  return static_cast<uint32_t>(ceil_div(static_cast<int32_t>(shape.intermediate), cols) * kMathWarps);
}
__device__ __forceinline__ int32_t part_begin_tile(const LayerShape& shape, int32_t part, int32_t num_parts) {
  return part_begin(ceil_div(static_cast<int32_t>(shape.hidden), kTileN), part, num_parts);
}
__device__ __forceinline__ uint32_t out_target(const LayerShape& shape, int32_t part, int32_t num_parts) {
  const int32_t tiles = part_begin_tile(shape, part + 1, num_parts) - part_begin_tile(shape, part, num_parts);
  return static_cast<uint32_t>(tiles * kMathWarps);
}

// Whole warp; true when every input of the task is there.
__device__ __forceinline__ bool wait_inputs(const PersistentParams& params, Direction direction, const PassFlags& flags,
                                            const MatrixTask& task, int32_t ticket) {
  const Plan& plan = params.plan;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const bool needs_rows = task.kind == TaskKind::kGateUp || task.kind == TaskKind::kDownDgrad;
  int32_t begin = task.m_tile;
  int32_t end = task.m_tile + (task.pair == TilePair::kRows ? 2 : 1);
  if (is_wgrad(task.kind)) {
    begin = plan.expert_block_begin[task.local_expert];
    end = plan.expert_block_begin[task.local_expert + 1];
  }
  bool ready = true;
  for (int32_t block = begin + lane; block < end && ready; block += 32) {
    const int32_t physical = block % plan.shape.capacity_blocks;
    const WaitSite site{WaitTask{static_cast<int32_t>(WaitTask::kGateUp) + static_cast<int32_t>(task.kind)}, ticket,
                        needs_rows ? FlagKind::kRowsReady : FlagKind::kMidReady, physical, -1};
    ready = needs_rows ? wait_counter(params, &flags.rows_ready[physical], kBlockRows, site)
                       : wait_counter(params, &flags.mid_ready[physical], mid_target(plan.shape, direction), site);
  }
  return __all_sync(~0U, ready);
}

// What CTA `cta` does of a task.
__device__ __forceinline__ TaskHead head_of(const Plan& plan, const MatrixTask& task, int32_t pass, int32_t cta) {
  TaskHead head{
      task.kind,   0,          task.pair != TilePair::kCols, static_cast<uint8_t>(pass % kNumBanks), task.local_expert,
      task.m_tile, task.n_tile};
  if (cta == 1 && task.pair == TilePair::kNone) return head;
  if (cta == 1) (task.pair == TilePair::kRows ? head.m_tile : head.n_tile) += 1;
  if (!is_wgrad(task.kind)) {
    head.valid_rows = static_cast<uint8_t>(valid_rows_of_block(plan, task.local_expert, head.m_tile));
    return head;
  }
  const LayerShape& shape = plan.shape;
  const bool down = task.kind == TaskKind::kDownWgrad;
  const auto rows = static_cast<int32_t>(down ? shape.hidden : shape.intermediate);
  const int32_t tile = down ? head.m_tile : head.m_tile % ceil_div(rows, kBlockRows);
  head.valid_rows = static_cast<uint8_t>(min_of(kBlockRows, rows - tile * kBlockRows));
  return head;
}

// One behind the last pass of this launch.
__device__ __forceinline__ int32_t end_pass(const PersistentParams& params) {
  return min_of(*params.plan.num_passes, params.end_pass);
}

// Whole warp; true when pass `pass` is open to this rank's workers.
__device__ __forceinline__ bool enter_pass(const PersistentParams& params, int32_t pass) {
  if (pass == 0) return true;
  bool open = true;
  if (threadIdx.x % 32 == 0) {
    open = wait_counter(params, params.flags.pass_open, static_cast<uint32_t>(pass),
                        {WaitTask::kEnterPass, pass, FlagKind::kPassOpen, -1, -1});
  }
  return __shfl_sync(~0U, open, 0);
}

// One warp of the first CTA of a cluster.
template <class Probe>
__device__ __forceinline__ void run_scheduler(const PersistentParams& params, SharedTile& shared, Direction direction,
                                              const Probe& probe) {
  const int32_t num_passes = end_pass(params);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  RingPosition<kTaskSlots> slot;
  int32_t pass = params.first_pass;
  int32_t ticket = 0;
  for (;;) {
    const PassFlags& flags = params.flags.banks[pass % kNumBanks];
    const int32_t first_task = params.table.pass_begin[pass];
    probe.delay(ProbeSite::kTakeTask, ticket);
    if (lane == 0) ticket = static_cast<int32_t>(ptx::atom_add_relaxed_gpu(flags.matrix_ticket, 1));
    ticket = __shfl_sync(~0U, ticket, 0);
    TaskHead head{};
    head.local_expert = -1;
    if (ticket < params.table.pass_begin[pass + 1] - first_task) {
      const MatrixTask task = params.table.tasks[first_task + ticket];
      if ((matrix_phase(task.kind) & params.phases) == 0) continue;
      if (wait_inputs(params, direction, flags, task, ticket)) head = head_of(params.plan, task, pass, lane & 1);
    } else if (pass + 1 < num_passes) {
      if (lane == 0) ptx::red_add_release_gpu(flags.workers_done, 1);
      if (enter_pass(params, pass + 1)) {
        ++pass;
        continue;
      }
    }
    ptx::mbarrier_wait(&shared.task_empty[slot.index], slot.phase ^ 1);
    __syncwarp();  // before any lane fills the slot: the phase would pass by a lane that has yet to look
    if (lane < static_cast<int32_t>(kClusterCtas)) {
      ptx::hand_over_16(ptx::map_shared(&shared.tasks[slot.index], static_cast<uint32_t>(lane)),
                        ptx::map_shared(&shared.task_full[slot.index], static_cast<uint32_t>(lane)),
                        *reinterpret_cast<const uint4*>(&head));
    }
    slot.advance();
    if (__all_sync(~0U, head.ends())) return;
  }
}

}  // namespace weft
