// Scheduling: one warp of a cluster takes a ticket when the next task is wanted, waits until the inputs of the task are
// there, and hands each CTA its tile.
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
__device__ __forceinline__ uint32_t z_target(const LayerShape& shape) {
  return static_cast<uint32_t>(ceil_div(static_cast<int32_t>(shape.intermediate), kGateUpCols) * kMathWarps);
}
__device__ __forceinline__ uint32_t mid_target(const LayerShape& shape, Direction direction) {
  if (direction == Direction::kForward) return z_target(shape);
  return static_cast<uint32_t>(ceil_div(static_cast<int32_t>(shape.intermediate), kTileN) * kMathWarps);
}
__device__ __forceinline__ int32_t part_begin_tile(const LayerShape& shape, int32_t part, int32_t num_parts) {
  return part_begin(ceil_div(static_cast<int32_t>(shape.hidden), kTileN), part, num_parts);
}
__device__ __forceinline__ uint32_t out_target(const LayerShape& shape, int32_t part, int32_t num_parts) {
  const int32_t tiles = part_begin_tile(shape, part + 1, num_parts) - part_begin_tile(shape, part, num_parts);
  return static_cast<uint32_t>(tiles * kMathWarps);
}

// Whole warp; true when every input of the task is there.
__device__ __forceinline__ bool wait_inputs(const PersistentParams& params, Direction direction, int32_t pass,
                                            const MatrixTask& task, int32_t ticket) {
  const Plan& plan = params.plan;
  const PassFlags& flags = params.flags.banks[pass % kNumBanks];
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  // z made again came from rows, dy among them.
  const bool needs_z = task.kind == TaskKind::kDownDgrad && recomputes(params.recompute, *plan.num_passes);
  const bool needs_rows = task.kind == TaskKind::kGateUp || (task.kind == TaskKind::kDownDgrad && !needs_z);
  if (needs_rows && plan.shape.ep_size == 1) return true;  // all tokens are the rank's own
  const uint32_t* counters = needs_rows ? flags.rows_ready : needs_z ? flags.z_ready : flags.mid_ready;
  const uint32_t target = needs_rows ? uint32_t{kBlockRows}
                          : needs_z  ? z_target(plan.shape)
                                     : mid_target(plan.shape, direction);
  const FlagKind flag = needs_rows ? FlagKind::kRowsReady : needs_z ? FlagKind::kZReady : FlagKind::kMidReady;
  int32_t begin = task.m_tile;
  int32_t end = task.m_tile + (task.pair == TilePair::kRows ? 2 : 1);
  if (is_wgrad(task.kind)) {
    const int32_t window_begin = pass * plan.shape.capacity_blocks;
    begin = max_of(plan.expert_block_begin[task.local_expert], window_begin);
    end = min_of(plan.expert_block_begin[task.local_expert + 1], window_begin + plan.shape.capacity_blocks);
  }
  const WaitTask waiter{static_cast<int32_t>(WaitTask::kGateUp) + static_cast<int32_t>(task.kind)};
  bool ready = true;
  for (int32_t block = begin + lane; block < end && ready; block += 32) {
    const int32_t place = block % plan.shape.capacity_blocks;
    ready = wait_counter(params, &counters[place], target, {waiter, ticket, flag, place, -1});
  }
  return __all_sync(~0U, ready);
}

static_assert(kMostPasses <= 1 << 16, "a TaskHead counts passes in 16 bits");

// What CTA `cta` does of a task.
__device__ __forceinline__ TaskHead head_of(const Plan& plan, const MatrixTask& task, int32_t pass, int32_t cta) {
  TaskHead head{task.kind,
                0,
                task.pair != TilePair::kCols,
                task.local_expert,
                task.m_tile,
                static_cast<int16_t>(task.n_tile),
                static_cast<uint16_t>(pass)};
  if (cta == 1 && task.pair == TilePair::kNone) return head;
  if (cta == 1 && task.pair == TilePair::kRows) ++head.m_tile;
  if (cta == 1 && task.pair == TilePair::kCols) ++head.n_tile;
  if (!is_wgrad(task.kind)) {
    head.valid_rows = static_cast<uint8_t>(valid_rows_of_block(plan, task.local_expert, head.m_tile));
    return head;
  }
  const int32_t rows_left = static_cast<int32_t>(plan.shape.hidden) - head.m_tile * kBlockRows;
  head.valid_rows = static_cast<uint8_t>(min_of(kBlockRows, rows_left));
  return head;
}

// One behind the last pass of this launch.
__device__ __forceinline__ int32_t end_pass(const PersistentParams& params) {
  return min_of(*params.plan.num_passes, params.launch.end_pass);
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

// Claims the next ticket whose task is of this launch's phases; false when the pass has no more. Whole warp.
template <class Probe>
__device__ __forceinline__ bool claim_task(const PersistentParams& params, int32_t pass, const Probe& probe,
                                           int32_t& ticket, MatrixTask& task) {
  const int32_t first_task = params.table.pass_begin[pass];
  const int32_t num_tasks = params.table.pass_begin[pass + 1] - first_task;
  do {
    probe.delay(ProbeSite::kTakeTask, ticket);
    uint32_t claimed = 0;
    if (threadIdx.x % 32 == 0)
      claimed = ptx::atom_add_relaxed_gpu(params.flags.banks[pass % kNumBanks].matrix_ticket, 1);
    ticket = static_cast<int32_t>(__shfl_sync(~0U, claimed, 0));
    if (ticket >= num_tasks) return false;
    task = params.table.tasks[first_task + ticket];
  } while ((matrix_phase(task.kind) & params.launch.phases) == 0);
  return true;
}

// One warp of the first CTA of a cluster.
template <class Probe>
__device__ __forceinline__ void run_scheduler(const PersistentParams& params, SharedTile& shared, Direction direction,
                                              const Probe& probe) {
  const int32_t num_passes = end_pass(params);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  RingPosition<kTaskSlots> slot;
  RingPosition<1> wanted;
  int32_t pass = params.launch.first_pass;
  int32_t ticket = 0;
  bool is_open = enter_pass(params, pass);
  for (;;) {
    ptx::mbarrier_wait(&shared.task_wanted, wanted.phase);
    wanted.advance();
    TaskHead head{};
    head.local_expert = TaskHead::kNoMoreTasks;
    MatrixTask task;
    if (is_open && claim_task(params, pass, probe, ticket, task)) {
      if (wait_inputs(params, direction, pass, task, ticket)) head = head_of(params.plan, task, pass, lane & 1);
    } else if (is_open && pass + 1 < num_passes) {
      head.local_expert = TaskHead::kPassEnds;
      head.pass = static_cast<uint16_t>(pass);
    }
    ptx::mbarrier_wait(&shared.task_empty[slot.index], slot.phase ^ 1);
    __syncwarp();  // before any lane fills the slot: the phases would pass by a lane that has yet to look
    if (lane < static_cast<int32_t>(kClusterCtas)) {
      ptx::hand_over_16(ptx::map_shared(&shared.tasks[slot.index], static_cast<uint32_t>(lane)),
                        ptx::map_shared(&shared.task_full[slot.index], static_cast<uint32_t>(lane)),
                        *reinterpret_cast<const uint4*>(&head));
    }
    slot.advance();
    if (__all_sync(~0U, head.ends())) return;
    if (head.ends_pass()) is_open = enter_pass(params, ++pass);
  }
}

}  // namespace weft
