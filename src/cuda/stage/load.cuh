// Bringing operands: the scheduler warp picks the CTA's tasks ahead of time; two load warps gather rows of x, half of a
// tile each, and the first lane of the first brings weight tiles and a' by TMA. A row of an expert's tile is read where
// its token lies, so no routed copy of x is ever written.
#pragma once

#include "cuda/launch/forward.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/stage/wait.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace weft {

// Steps of K a task takes.
__device__ __forceinline__ int32_t num_k_steps(const LayerShape& shape, TaskKind kind) {
  const int64_t depth = kind == TaskKind::kGateUp ? shape.hidden : shape.intermediate;
  return static_cast<int32_t>(ceil_div<int64_t>(depth, kTileK));
}

// How a role takes the next task; whole warps. The slot is given back by release_task, when nobody needs it any more.
__device__ __forceinline__ TaskHead take_task(SharedTile& shared, const RingPosition<kTaskSlots>& slot) {
  ptx::mbarrier_wait(&shared.task_full[slot.index], slot.phase);
  return shared.tasks[slot.index].head;
}
__device__ __forceinline__ void release_task(SharedTile& shared, RingPosition<kTaskSlots>& slot) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.task_empty[slot.index]);
  slot.advance();
}

// One warp. Takes a ticket, looks up the rows to gather, waits until the task's inputs are there and hands the task
// out; the slots let it do so while the task before is still being multiplied.
__device__ inline void run_scheduler(const ForwardParams& params, SharedTile& shared) {
  const LayerShape& shape = params.plan.shape;
  const PassFlags& flags = params.flags.banks[0];
  const auto num_tasks = static_cast<uint32_t>(params.table.pass_begin[1]);
  const auto mid_tiles = static_cast<uint32_t>(ceil_div<int64_t>(shape.intermediate, kGateUpCols) * kMathWarps);
  const auto row_chunks = static_cast<uint32_t>(shape.hidden / 8);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  RingPosition<kTaskSlots> slot;
  for (;;) {
    uint32_t ticket = 0;
    if (lane == 0) ticket = ptx::atom_add_relaxed_gpu(flags.matrix_ticket, 1);
    ticket = __shfl_sync(~0U, ticket, 0);
    TaskHead head{};
    if (ticket < num_tasks) {
      head.task = params.table.tasks[ticket];
      head.valid_rows = valid_rows_of_block(params.plan, head.task.local_expert, head.task.m_tile);
    }
    ptx::mbarrier_wait(&shared.task_empty[slot.index], slot.phase ^ 1);
    TaskSlot& next = shared.tasks[slot.index];
    if (head.valid_rows > 0 && head.task.kind == TaskKind::kGateUp) {
      // Padding rows gather some valid row: their results are never read.
      for (int32_t row = lane; row < kBlockRows; row += 32) {
        const int32_t source = head.task.m_tile * kBlockRows + min_of(row, head.valid_rows - 1);
        next.gather_rows[row] = static_cast<uint32_t>(params.plan.row_route[source].token) * row_chunks;
      }
    }
    __syncwarp();
    if (lane == 0) {
      if (head.valid_rows > 0 && head.task.kind == TaskKind::kDown) {
        const int32_t block = head.task.m_tile % shape.capacity_blocks;
        if (!wait_counter(params, &flags.mid_ready[block], mid_tiles, WaitTask::kDown, FlagKind::kMidReady, block)) {
          head.valid_rows = 0;  // the CTA ends here
        }
        ptx::fence_proxy_async();  // a' came by bulk stores of other SMs; this CTA reads it by TMA
      }
      next.head = head;
      ptx::mbarrier_arrive(&shared.task_full[slot.index]);
    }
    slot.advance();
    if (__shfl_sync(~0U, head.valid_rows, 0) == 0) return;
  }
}

// The TMA loads of one stage, by one lane.
__device__ __forceinline__ void load_stage(const ForwardParams& params, SharedTile& shared, const MatrixTask& task,
                                           int32_t stage, int32_t step) {
  uint64_t* full = &shared.stage_full[stage];
  uint8_t* b = shared.b[stage];
  if (task.kind == TaskKind::kGateUp) {
    ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.b[0]));
    ptx::tma_load(&params.gate, b, full, step * kTileK, task.n_tile * kGateUpCols, task.local_expert);
    ptx::tma_load(&params.up, b + sizeof(shared.b[0]) / 2, full, step * kTileK, task.n_tile * kGateUpCols,
                  task.local_expert);
  } else {
    const auto pool_row = static_cast<int32_t>(params.plan.physical_row(task.m_tile * kBlockRows));
    ptx::mbarrier_arrive(full, kGatherArrivals);  // in the place of the gathering lanes
    ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.a[0]) + sizeof(shared.b[0]));
    ptx::tma_load(&params.act, shared.a[stage], full, step * kTileK, pool_row, 0);
    ptx::tma_load(&params.down, b, full, step * kTileK, task.n_tile * kTileN, task.local_expert);
  }
}

__device__ inline void run_load(const ForwardParams& params, SharedTile& shared, int32_t load_warp) {
  constexpr int32_t kRowsPerCopy = 4;  // 8 lanes bring the 128 bytes of a row
  constexpr int32_t kCopies = kBlockRows / kRowsPerCopy / kLoadWarps;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const bool leads = load_warp == 0 && lane == 0;
  const int32_t chunk = lane % 8;
  const int32_t first_row = load_warp * kCopies * kRowsPerCopy + lane / 8;
  RingPosition<kTaskSlots> slot;
  RingPosition<kStages> stage;
  for (;;) {
    const TaskHead head = take_task(shared, slot);
    const bool gathers = head.task.kind == TaskKind::kGateUp;
    uint32_t rows[kCopies];
#pragma unroll
    for (int32_t copy = 0; copy < kCopies; ++copy) {
      rows[copy] = shared.tasks[slot.index].gather_rows[first_row + copy * kRowsPerCopy];
    }
    release_task(shared, slot);
    if (head.valid_rows == 0) return;
    const auto* source = reinterpret_cast<const uint4*>(params.x) + chunk;
    const int32_t num_steps = num_k_steps(params.plan.shape, head.task.kind);
    for (int32_t step = 0; step < num_steps; ++step) {
      // Without gathering the second warp keeps step all the same: a parity tells only the next phase from this one.
      ptx::mbarrier_wait(&shared.stage_empty[stage.index], stage.phase ^ 1);
      if (leads) load_stage(params, shared, head.task, stage.index, step);
      if (gathers) {
        const uint32_t target = ptx::shared_address(shared.a[stage.index]);
#pragma unroll
        for (int32_t copy = 0; copy < kCopies; ++copy) {
          ptx::cp_async_16(target + swizzled(first_row + copy * kRowsPerCopy, chunk), source + rows[copy]);
        }
        ptx::cp_async_mbarrier_arrive(&shared.stage_full[stage.index]);
        source += kTileK / 8;
      }
      stage.advance();
    }
  }
}

}  // namespace weft
