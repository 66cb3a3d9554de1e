// The tasks of the forward: gate_up, z = x W_gate_up^T with SwiGLU in the epilogue, where a thread holds g and u of the
// same element; and down, o = a' W_down^T.
#pragma once

#include "cuda/launch/forward.hpp"
#include "cuda/stage/gate_up.cuh"
#include "cuda/stage/load.cuh"

namespace weft {

__device__ __forceinline__ int32_t forward_steps(const LayerShape& shape, TaskKind kind) {
  const int64_t depth = kind == TaskKind::kGateUp ? shape.hidden : shape.intermediate;
  return static_cast<int32_t>(ceil_div<int64_t>(depth, kTileK));
}

struct ForwardOperands {
  static constexpr bool kHasWgrads = false;
  const ForwardParams& params;

  // B as two boxes of 64 columns and 128 rows. Of a gate_up tile the first is gate, the second up.
  struct Tile : LoadTile {
    const CUtensorMap* map[2];
    int32_t row[2];
  };
  __device__ __forceinline__ Tile tile(const TaskHead& head) const {
    const LayerShape& shape = params.plan.shape;
    Tile tile{};
    static_cast<TaskHead&>(tile) = head;
    tile.num_steps = forward_steps(shape, head.kind);
    tile.first_row = head.m_tile * kBlockRows;
    if (head.kind == TaskKind::kGateUp) {
      tile.gathered = Gathered::kRows;
      tile.tokens = params.x.rows();
      tile.last_row = tile.first_row + max_of(1, int32_t{head.valid_rows}) - 1;
      tile.map[0] = &params.gate;
      tile.map[1] = &params.up;
      tile.row[0] = tile.row[1] = head.n_tile * kGateUpCols;
    } else {
      tile.first_row = pool_row(params.plan, tile.first_row);
      tile.map[0] = tile.map[1] = &params.down;
      tile.row[0] = head.n_tile * kTileN;
      tile.row[1] = tile.row[0] + kTileN / 2;
    }
    return tile;
  }
  __device__ __forceinline__ void load_a(uint8_t* a, uint64_t* full, const Tile& tile, int32_t step) const {
    ptx::tma_load(&params.act, a, full, step * kTileK, tile.first_row, 0);
  }
  template <class Load>
  __device__ __forceinline__ void load_b(uint8_t* b, const Tile& tile, int32_t step, int32_t half, Load load) const {
    load(half == 0 ? tile.map[0] : tile.map[1], b, step * kTileK, half == 0 ? tile.row[0] : tile.row[1],
         tile.local_expert);
  }
  __device__ __forceinline__ void load_extra(uint8_t*, uint8_t*, uint64_t*, const Tile&, int32_t) const {}
};

// silu(g) u in fp32; tanh.approx is accurate to 2^-11, below the rounding of the result. Whether there is a limit is
// asked once a tile: a condition an element would cost as much as the element.
template <bool kClamps>
__device__ __forceinline__ float swiglu_approx(float g, float u, float clamp_limit) {
  if constexpr (kClamps) {
    g = fminf(g, clamp_limit);
    u = fminf(fmaxf(u, -clamp_limit), clamp_limit);
  }
  const float half = 0.5F * g;
  return (half + half * ptx::tanh_approx(half)) * u;
}

template <bool kSaveZ>
struct ForwardBodies {
  const ForwardParams& params;

  __device__ __forceinline__ int32_t num_stages(const TaskHead& head) const {
    return forward_steps(params.plan.shape, head.kind);
  }
  __device__ __forceinline__ uint32_t* counter(const TaskHead& head) const {
    const PassFlags& flags = params.flags.banks[head.pass % kNumBanks];
    const LayerShape& shape = params.plan.shape;
    const int32_t block = head.m_tile % shape.capacity_blocks;
    if (head.kind == TaskKind::kGateUp) return &flags.mid_ready[block];
    constexpr int32_t kParts = kHopperTiling.down_parts;
    const int32_t part = kParts == 1 || head.n_tile < part_begin_tile(shape, 1, kParts) ? 0 : 1;
    return &flags.out_ready[part * shape.capacity_blocks + block];
  }
  __device__ __forceinline__ void run(const TaskHead& head, int32_t row_in_block, StageReader& stage, TileStore& store,
                                      DeferredPublish& publish, float (&acc)[128]) const {
    // Before the product, which hides the wait for them.
    const float* row_weight = params.plan.row_weight + head.m_tile * kBlockRows + row_in_block + threadIdx.x % 32 / 4;
    const float weights[2] = {row_weight[0], row_weight[8]};
    multiply<ptx::Major::kK, ptx::Major::kK>(stage, forward_steps(params.plan.shape, head.kind), row_in_block / 64,
                                             head.kind == TaskKind::kGateUp, publish, acc);
    if (head.kind == TaskKind::kGateUp) {
      if (params.clamp_limit > 0) {
        finish_gate_up<true>(head, row_in_block, weights, store, acc);
      } else {
        finish_gate_up<false>(head, row_in_block, weights, store, acc);
      }
    } else {
      const int32_t first_row = pool_row(params.plan, head.m_tile * kBlockRows + row_in_block);
      store_bf16(store, &params.rows_store, head.n_tile * kTileN, first_row, 0, acc);
    }
  }

 private:
  template <bool kClamps>
  __device__ __forceinline__ void finish_gate_up(const TaskHead& head, int32_t row_in_block, const float (&weights)[2],
                                                 TileStore& store, float (&acc)[128]) const {
    const int32_t first_row = pool_row(params.plan, head.m_tile * kBlockRows + row_in_block);
#pragma unroll
    for (int32_t part = 0; part < 2; ++part) {
      if constexpr (kSaveZ) store_z(store, &params.z_store, head.n_tile, part, first_row, acc);
      const int32_t column = head.n_tile * kGateUpCols + part * kStoreCols;
      store.store(&params.act_store, column, first_row, 0, [&](int32_t j, int32_t half) {
        const uint32_t g = packed_z(acc, kGateAcc, part, j, half);
        const uint32_t u = packed_z(acc, kUpAcc, part, j, half);
        const float low = swiglu_approx<kClamps>(ptx::low_bf16(g), ptx::low_bf16(u), params.clamp_limit);
        const float high = swiglu_approx<kClamps>(ptx::high_bf16(g), ptx::high_bf16(u), params.clamp_limit);
        return ptx::pack_bf16(weights[half] * low, weights[half] * high);
      });
    }
  }
};

}  // namespace weft
