// Math: two warpgroups of 64 rows each turn stages into accumulators and accumulators into stored tiles. SwiGLU lives
// in the gate_up epilogue, where a thread holds g and u of the same element.
#pragma once

#include "cuda/ptx/warp.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/stage/load.cuh"

namespace weft {

// Stores that have been issued but not yet announced. A warp does not wait for its stores at the end of a tile: it
// announces them a few K steps into the next one, when they have landed anyway, and in any case before it waits for a
// task, or CTAs would wait for one another's unannounced tiles.
class DeferredPublish {
 public:
  __device__ __forceinline__ void defer(uint32_t* counter) { counter_ = counter; }
  __device__ __forceinline__ void publish() {
    if (counter_ != nullptr && threadIdx.x % 32 == 0) {
      ptx::bulk_wait();
      ptx::red_add_release_gpu(counter_, 1U);
    }
    counter_ = nullptr;
    __syncwarp();
  }

 private:
  uint32_t* counter_ = nullptr;
};

// A warp's 16 rows on their way out: 64 columns at a time through two buffers.
class TileStore {
 public:
  __device__ __forceinline__ explicit TileStore(uint8_t (*buffers)[16 * kStoreCols * 2]) : buffers_(buffers) {}

  // 16x64 values in accumulator layout, `packed(j, half)` giving columns 8 j + {0, 1} of the upper or lower row.
  template <class Packed>
  __device__ __forceinline__ void store(const CUtensorMap* map, int32_t x, int32_t y, int32_t z, Packed packed) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    if (lane == 0) ptx::bulk_wait_read<kStoreBuffers - 1>();
    __syncwarp();
    const uint32_t buffer = ptx::shared_address(buffers_[next_]);
    const int32_t row = lane % 16;
#pragma unroll
    for (int32_t j = 0; j < kStoreCols / 8; j += 2) {
      ptx::stmatrix_x4(buffer + swizzled(row, j + lane / 16), packed(j, 0), packed(j, 1), packed(j + 1, 0),
                       packed(j + 1, 1));
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      ptx::tma_store(map, buffers_[next_], x, y, z);
      ptx::bulk_commit();
    }
    next_ = (next_ + 1) % kStoreBuffers;
  }

 private:
  uint8_t (*buffers_)[16 * kStoreCols * 2];
  int32_t next_ = 0;
};

__device__ __forceinline__ void release_stage(SharedTile& shared, int32_t stage) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.stage_empty[stage]);
}

// acc = A[64 rows of this warpgroup] B^T over num_steps stages.
__device__ __forceinline__ void multiply(SharedTile& shared, RingPosition<kStages>& stage, int32_t num_steps,
                                         int32_t warpgroup, DeferredPublish& publish, float (&acc)[128]) {
  constexpr int32_t kPublishStep = 2;
  int32_t previous = 0;
  for (int32_t step = 0; step < num_steps; ++step) {
    ptx::mbarrier_wait(&shared.stage_full[stage.index], stage.phase);
    ptx::fence_async_shared();  // gathered rows were written by cp.async
    const uint64_t a = ptx::k_major_descriptor(shared.a[stage.index] + warpgroup * 64 * 128);
    const uint64_t b = ptx::k_major_descriptor(shared.b[stage.index]);
    ptx::wgmma_fence();
#pragma unroll
    for (int32_t k = 0; k < kTileK / 16; ++k) ptx::wgmma_m64n256k16(acc, a + 2 * k, b + 2 * k, step > 0 || k > 0);
    ptx::wgmma_commit();
    if (step > 0) {
      ptx::wgmma_wait<1>();
      release_stage(shared, previous);
    }
    if (step == kPublishStep) publish.publish();
    previous = stage.index;
    stage.advance();
  }
  ptx::wgmma_wait<0>();
  release_stage(shared, previous);
  publish.publish();  // a contraction too short for the step above
}

// A warpgroup whose 64 rows are all padding lets the stages pass.
__device__ __forceinline__ void skip(SharedTile& shared, RingPosition<kStages>& stage, int32_t num_steps) {
  for (int32_t step = 0; step < num_steps; ++step) {
    ptx::mbarrier_wait(&shared.stage_full[stage.index], stage.phase);
    release_stage(shared, stage.index);
    stage.advance();
  }
}

// silu(g) u in fp32; tanh.approx is accurate to 2^-11, below the rounding of the result.
__device__ __forceinline__ float swiglu_approx(float g, float u, float clamp_limit) {
  if (clamp_limit > 0) {
    g = fminf(g, clamp_limit);
    u = fminf(fmaxf(u, -clamp_limit), clamp_limit);
  }
  const float half = 0.5F * g;
  return (half + half * ptx::tanh_approx(half)) * u;
}

template <bool kSaveZ>
__device__ __forceinline__ void finish_gate_up(const ForwardParams& params, TileStore& store, const MatrixTask& task,
                                               int32_t row_in_block, float (&acc)[128]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t virtual_row = task.m_tile * kBlockRows + row_in_block;
  const auto pool_row = static_cast<int32_t>(params.plan.physical_row(virtual_row));
  const float weights[2] = {params.plan.row_weight[virtual_row + lane / 4],
                            params.plan.row_weight[virtual_row + lane / 4 + 8]};
#pragma unroll
  for (int32_t part = 0; part < 2; ++part) {
    const int32_t column = task.n_tile * kGateUpCols + part * kStoreCols;
    const auto z_of = [&](int32_t first, int32_t j, int32_t half) {
      const int32_t n = first + 4 * (part * 8 + j) + 2 * half;
      return ptx::pack_bf16(acc[n], acc[n + 1]);
    };
    if constexpr (kSaveZ) {
      store.store(&params.z_store, column, 0, pool_row, [&](int32_t j, int32_t half) { return z_of(0, j, half); });
      store.store(&params.z_store, column, 1, pool_row, [&](int32_t j, int32_t half) { return z_of(64, j, half); });
    }
    store.store(&params.act_store, column, pool_row, 0, [&](int32_t j, int32_t half) {
      // z rounded once, as backward will read it.
      const uint32_t g = z_of(0, j, half);
      const uint32_t u = z_of(64, j, half);
      const float low = swiglu_approx(ptx::low_bf16(g), ptx::low_bf16(u), params.clamp_limit);
      const float high = swiglu_approx(ptx::high_bf16(g), ptx::high_bf16(u), params.clamp_limit);
      return ptx::pack_bf16(weights[half] * low, weights[half] * high);
    });
  }
}

__device__ __forceinline__ void finish_down(const ForwardParams& params, TileStore& store, const MatrixTask& task,
                                            int32_t row_in_block, float (&acc)[128]) {
  const auto pool_row = static_cast<int32_t>(params.plan.physical_row(task.m_tile * kBlockRows + row_in_block));
#pragma unroll
  for (int32_t part = 0; part < kTileN / kStoreCols; ++part) {
    store.store(&params.out_store, task.n_tile * kTileN + part * kStoreCols, pool_row, 0, [&](int32_t j, int32_t half) {
      const int32_t n = 4 * (part * 8 + j) + 2 * half;
      return ptx::pack_bf16(acc[n], acc[n + 1]);
    });
  }
}

template <bool kSaveZ>
__device__ inline void run_math(const ForwardParams& params, SharedTile& shared, int32_t warpgroup) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32 % 4);
  const int32_t row_in_block = warpgroup * 64 + warp * 16;
  const PassFlags& flags = params.flags.banks[0];
  const int32_t capacity_blocks = params.plan.shape.capacity_blocks;
  RingPosition<kTaskSlots> slot;
  RingPosition<kStages> stage;
  TileStore store(shared.store[warpgroup * 4 + warp]);
  DeferredPublish publish;
  float acc[128];
  for (;;) {
    const bool idle = !ptx::mbarrier_try_wait(&shared.task_full[slot.index], slot.phase);
    if (__any_sync(~0U, idle)) publish.publish();
    const TaskHead next = take_task(shared, slot);
    release_task(shared, slot);
    if (next.valid_rows == 0) break;
    const int32_t num_steps = num_k_steps(params.plan.shape, next.task.kind);
    if (next.valid_rows > warpgroup * 64) {
      multiply(shared, stage, num_steps, warpgroup, publish, acc);
      if (next.task.kind == TaskKind::kGateUp) {
        finish_gate_up<kSaveZ>(params, store, next.task, row_in_block, acc);
      } else {
        finish_down(params, store, next.task, row_in_block, acc);
      }
    } else {
      publish.publish();
      skip(shared, stage, num_steps);
    }
    const int32_t block = next.task.m_tile % capacity_blocks;
    publish.defer(next.task.kind == TaskKind::kGateUp ? &flags.mid_ready[block] : &flags.out_ready[block]);
  }
  publish.publish();
}

}  // namespace weft
