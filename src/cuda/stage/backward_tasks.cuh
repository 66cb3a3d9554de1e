// The tasks of the backward: gate_up, z = x W_gate_up^T, where z has to be made again; down_dgrad, u' = dy W_down with
// the derivative of SwiGLU in the epilogue; gate_up_dgrad, dx = dz W_gate_up; down_wgrad, dW_down = dy^T a';
// gate_up_wgrad, dW_gate_up = dz^T x. Weights of a dgrad, and both operands of a weight gradient, are read as they lie:
// MN-major.
#pragma once

#include "cuda/launch/backward.hpp"
#include "cuda/stage/gate_up.cuh"
#include "cuda/stage/load.cuh"

namespace weft {

inline constexpr int32_t kChunkCols = 64;                        // of a box: 128 bytes
inline constexpr int32_t kChunkBytes = kChunkCols * kTileK * 2;  // 64 rows of it
inline constexpr int32_t kZChunks = kTileN / kChunkCols;         // stages that z of a tile takes
static_assert(kZChunks < kClaimStages, "the load lane asks for the next task at a step, not behind the last");

// A weight gradient sums over the rows of its expert, up to the last half block that has a valid one: as far as
// dispatch and down_dgrad have zeroed what is padding.
__device__ __forceinline__ int32_t wgrad_steps(const ExpertRows& rows) { return ceil_div(rows.count, kTileK); }
__device__ __forceinline__ int32_t backward_steps(const Plan& plan, const TaskHead& head) {
  if (is_wgrad(head.kind)) return wgrad_steps(expert_rows_in_pass(plan, head.local_expert, head.pass));
  const LayerShape& shape = plan.shape;
  const int64_t depth = head.kind == TaskKind::kGateUpDgrad ? 2 * shape.intermediate : shape.hidden;
  return static_cast<int32_t>(depth / kTileK);
}

struct BackwardOperands {
  const BackwardParams& params;
  bool in_one_pass;

  __device__ __forceinline__ int32_t num_steps(const TaskHead& head) const { return backward_steps(params.plan, head); }

  __device__ __forceinline__ int32_t first_row(const TaskHead& head) const {
    const Plan& plan = params.plan;
    const int32_t row =
        is_wgrad(head.kind) ? expert_rows_in_pass(plan, head.local_expert, head.pass).begin : head.m_tile * kBlockRows;
    return pool_row(plan, row);
  }

  __device__ __forceinline__ void load_a(uint8_t* a, uint64_t* full, const LoadTile& tile, int32_t step) const {
    const bool is_dz = tile.kind == TaskKind::kGateUpDgrad || tile.kind == TaskKind::kGateUpWgrad;
    const CUtensorMap* map = is_dz ? &params.dz : tile.kind == TaskKind::kGateUp ? &params.x_rows : &params.dy;
    const auto intermediate = static_cast<int32_t>(params.plan.shape.intermediate);
    if (is_wgrad(tile.kind)) {
      const int32_t gate_tiles = ceil_div(intermediate, kBlockRows);
      const int32_t part = is_dz && tile.m_tile >= gate_tiles ? 1 : 0;
      const int32_t column = (tile.m_tile - part * gate_tiles) * kBlockRows;
      const int32_t row = tile.first_row + step * kTileK;
      ptx::tma_load(map, a, full, column, part, row);
      ptx::tma_load(map, a + kChunkBytes, full, column + kChunkCols, part, row);
    } else {
      const int32_t part = is_dz && step * kTileK >= intermediate ? 1 : 0;
      const int32_t column = step * kTileK - part * intermediate;
      ptx::tma_load(map, a, full, column, part, tile.first_row);
      ptx::tma_load(map, a + kChunkBytes, full, column, part, tile.first_row + kBlockRows / 2);
    }
  }

  template <class Load>
  __device__ __forceinline__ void load_b(uint8_t* b, const LoadTile& tile, int32_t step, int32_t half,
                                         Load load) const {
    if (tile.kind == TaskKind::kGateUp) {  // the first half is gate, the second up
      const CUtensorMap* weight = half == 0 ? &params.gate : &params.up;
      const int32_t first_row = tile.n_tile * kGateUpCols;
      load(weight, b, step * kTileK, first_row, tile.local_expert);
      load(weight, b + kChunkBytes, step * kTileK, first_row + kGateUpCols / 2, tile.local_expert);
      return;
    }
    const CUtensorMap* map = &params.down;
    int32_t row = step * kTileK;
    int32_t expert = tile.local_expert;
    if (tile.kind == TaskKind::kGateUpDgrad) {
      const auto intermediate = static_cast<int32_t>(params.plan.shape.intermediate);
      const bool is_up = row >= intermediate;
      map = is_up ? &params.up : &params.gate;
      row -= is_up ? intermediate : 0;
    } else if (is_wgrad(tile.kind)) {
      map = tile.kind == TaskKind::kDownWgrad ? &params.act : &params.x;
      row += tile.first_row;
      expert = 0;  // a pool has none
    }
    const int32_t column = tile.n_tile * kTileN + half * (kTileN / 2);
    load(map, b, column, row, expert);
    load(map, b + kChunkBytes, column + kChunkCols, row, expert);
  }

  __device__ __forceinline__ int32_t num_extra(const TaskHead& head) const {
    return head.kind == TaskKind::kDownDgrad ? kZChunks : 0;
  }
  // 64 columns of g take the place of A, the same of u the first half of B's.
  __device__ __forceinline__ void load_extra(uint8_t* a, uint8_t* b, uint64_t* full, const LoadTile& tile,
                                             int32_t n) const {
    const int32_t column = tile.n_tile * kTileN + n * kChunkCols;
    ptx::mbarrier_arrive_expect_tx(full, 2 * kBlockRows * kChunkCols * 2);
    const CUtensorMap* z = in_one_pass ? &params.z : &params.z_in_passes;
    ptx::tma_load(z, a, full, column, 0, tile.first_row);
    ptx::tma_load(z, b, full, column, 1, tile.first_row);
  }
};

// What SwiGLU passes back for one element, from u' and z; `dw` grows by its part of the router gradient.
struct SwigluBackward {
  float dg;
  float du;
  float act;
};
__device__ __forceinline__ SwigluBackward swiglu_backward(float g, float u, float u_prime, float weight,
                                                          float clamp_limit, float& dw) {
  const float raw_g = g;
  const float raw_u = u;
  if (clamp_limit > 0) {
    g = fminf(g, clamp_limit);
    u = fminf(fmaxf(u, -clamp_limit), clamp_limit);
  }
  const float half = 0.5F * g;
  const float tanh = ptx::tanh_approx(half);
  const float silu = half + half * tanh;
  const float sigmoid = 0.5F + 0.5F * tanh;
  const float a = silu * u;
  const float da = weight * u_prime;
  dw += u_prime * a;
  SwigluBackward out{da * u * (sigmoid + silu * (1 - sigmoid)), da * silu, weight * a};
  if (clamp_limit > 0) {
    if (g != raw_g) out.dg = 0;
    if (u != raw_u) out.du = 0;
  }
  return out;
}

template <int32_t kRanks>
struct BackwardBodies {
  const Together<BackwardParams, kRanks>& launch;
  const BackwardParams& params;

  __device__ __forceinline__ int32_t num_stages(const TaskHead& head) const {
    return backward_steps(params.plan, head) + (head.kind == TaskKind::kDownDgrad ? kZChunks : 0);
  }
  // A CTA without a tile of the pair raises nothing: what it loads all the same, dy among it, it does not use.
  __device__ __forceinline__ uint32_t* counter(const TaskHead& head) const {
    const PassFlags& flags = params.flags.banks[head.pass % kNumBanks];
    const int32_t block = head.m_tile % params.plan.shape.capacity_blocks;
    if (head.kind == TaskKind::kDownWgrad && params.num_dy_readers > 0) return &flags.dy_read[head.local_expert];
    if (head.kind == TaskKind::kGateUp) return &flags.z_ready[block];
    if (head.kind == TaskKind::kDownDgrad) return &flags.mid_ready[block];
    return head.kind == TaskKind::kGateUpDgrad ? &flags.out_ready[block] : nullptr;
  }
  __device__ __forceinline__ void run(const TaskHead& head, int32_t row_in_block, StageReader& stage, TileStore& store,
                                      DeferredPublish& publish, float (&acc)[128]) const {
    const int32_t warpgroup = row_in_block / 64;
    if (is_wgrad(head.kind)) {
      const ExpertRows rows = expert_rows_in_pass(params.plan, head.local_expert, head.pass);
      if (rows.count > 0) {
        multiply<ptx::Major::kMN, ptx::Major::kMN>(stage, wgrad_steps(rows), warpgroup, publish, acc);
        if (rows.resumes) add_carried(head, acc);
        if (rows.continues) {
          carry_on(head, acc);
        } else {
          finish_wgrad(head, row_in_block, store, acc);
        }
      } else {
        publish.publish();
        if (!params.accumulates) store_zeroes(head, row_in_block, store);
      }
    } else if (head.kind == TaskKind::kGateUp) {
      multiply<ptx::Major::kK, ptx::Major::kK>(stage, backward_steps(params.plan, head), warpgroup, publish, acc);
      const int32_t first_row = pool_row(params.plan, head.m_tile * kBlockRows + row_in_block);
#pragma unroll
      for (int32_t part = 0; part < 2; ++part)
        store_z(store, map(&BackwardParams::dz_store), head.n_tile, part, first_row, acc);
    } else {
      multiply<ptx::Major::kK, ptx::Major::kMN>(stage, backward_steps(params.plan, head), warpgroup, publish, acc);
      if (head.kind == TaskKind::kDownDgrad) {
        finish_down_dgrad(head, row_in_block, stage, store, acc);
      } else {
        const int32_t first_row = pool_row(params.plan, head.m_tile * kBlockRows + row_in_block);
        store_bf16(store, map(&BackwardParams::rows_store), head.n_tile * kTileN, first_row, 0, acc);
      }
    }
  }

 private:
  __device__ __forceinline__ const CUtensorMap* map(CUtensorMap BackwardParams::*which) const {
    return &(own_params_anew(launch).*which);
  }

  // dg and du take the place of g and u in the stage, from where they are stored.
  __device__ __forceinline__ void finish_down_dgrad(const TaskHead& head, int32_t row_in_block, StageReader& stage,
                                                    TileStore& store, const float (&acc)[128]) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t virtual_row = head.m_tile * kBlockRows + row_in_block;
    const int32_t first_row = pool_row(params.plan, virtual_row);
    const float weights[2] = {weight_of(head, row_in_block + lane / 4), weight_of(head, row_in_block + lane / 4 + 8)};
    float dw[2] = {};
    int32_t previous = 0;
#pragma unroll
    for (int32_t chunk = 0; chunk < kZChunks; ++chunk) {
      stage.wait();
      uint8_t* gate_rows = stage.a() + row_in_block * 128;
      uint8_t* up_rows = stage.b() + row_in_block * 128;
      const uint32_t gate = ptx::shared_address(gate_rows);
      const uint32_t up = ptx::shared_address(up_rows);
      const uint32_t act = store.claim();
#pragma unroll
      for (int32_t j = 0; j < kChunkCols / 8; j += 2) {
        const int32_t offset = swizzled(lane % 16, j + lane / 16);
        uint32_t g[4];
        uint32_t u[4];
        uint32_t a[4];
        ptx::ldmatrix_x4(gate + offset, g[0], g[1], g[2], g[3]);
        ptx::ldmatrix_x4(up + offset, u[0], u[1], u[2], u[3]);
#pragma unroll
        for (int32_t m = 0; m < 4; ++m) {  // 8x8 matrices: rows m % 2, columns m / 2
          const int32_t n = 4 * (chunk * 8 + j + m / 2) + 2 * (m % 2);
          const auto low = swiglu_backward(ptx::low_bf16(g[m]), ptx::low_bf16(u[m]), acc[n], weights[m % 2],
                                           params.clamp_limit, dw[m % 2]);
          const auto high = swiglu_backward(ptx::high_bf16(g[m]), ptx::high_bf16(u[m]), acc[n + 1], weights[m % 2],
                                            params.clamp_limit, dw[m % 2]);
          g[m] = ptx::pack_bf16(low.dg, high.dg);
          u[m] = ptx::pack_bf16(low.du, high.du);
          a[m] = ptx::pack_bf16(low.act, high.act);
        }
        ptx::stmatrix_x4(gate + offset, g[0], g[1], g[2], g[3]);
        ptx::stmatrix_x4(up + offset, u[0], u[1], u[2], u[3]);
        ptx::stmatrix_x4(act + offset, a[0], a[1], a[2], a[3]);
      }
      const int32_t column = head.n_tile * kTileN + chunk * kChunkCols;
      store.send([&](const uint8_t* act_rows) {
        ptx::tma_store(map(&BackwardParams::dz_store), gate_rows, column, 0, first_row);
        ptx::tma_store(map(&BackwardParams::dz_store), up_rows, column, 1, first_row);
        ptx::tma_store(map(&BackwardParams::act_store), act_rows, column, first_row, 0);
      });
      // A chunk later the stores have read the stage.
      if (chunk > 0) release_after_stores<1>(stage, previous);
      previous = stage.index();
      stage.advance();
    }
    release_after_stores<0>(stage, previous);
    send_dw(head, virtual_row, dw);
  }

  template <int32_t kPending>
  __device__ __forceinline__ void release_after_stores(StageReader& stage, int32_t index) const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<kPending>();
    __syncwarp();
    stage.release(index);
  }

  // Zero in a padding row, whose dz and a' are then zeroes: weight gradients sum over it.
  __device__ __forceinline__ float weight_of(const TaskHead& head, int32_t row) const {
    return row < head.valid_rows ? params.plan.row_weight[head.m_tile * kBlockRows + row] : 0;
  }

  // Four lanes hold a row's columns.
  __device__ __forceinline__ void send_dw(const TaskHead& head, int32_t virtual_row, const float (&dw)[2]) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      float sum = dw[half] + __shfl_xor_sync(~0U, dw[half], 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      const int64_t row = pool_row(params.plan, virtual_row + lane / 4 + 8 * half);
      if (lane % 4 == 0) params.dw_parts[row * params.num_dw_tiles + head.n_tile] = sum;
    }
    __syncwarp();  // before the lane that announces the tile does
  }

  // A weight gradient whose expert straddles passes: each pass adds what those before have left, in the order of the
  // accumulators, and the last rounds. A boundary cuts one expert, and so a pass may end one and leave another: two
  // buffers, by parity.
  __device__ __forceinline__ float2* carry_of(const TaskHead& head, uint32_t pass) const {
    const bool down = head.kind == TaskKind::kDownWgrad;
    const LayerShape& shape = params.plan.shape;
    const WgradTiles tiles = wgrad_tiles(shape);
    const int32_t tile = down ? head.m_tile * tiles.down_cols + head.n_tile
                              : tiles.num_down + head.m_tile * tiles.gate_up_cols + head.n_tile;
    const int64_t warp_tile = (int64_t{pass % 2} * tiles.num_all() + tile) * kMathWarps + threadIdx.x / 32 % kMathWarps;
    return params.wgrad_carry + warp_tile * (16 * kTileN / 2) + threadIdx.x % 32;
  }
  __device__ __forceinline__ void add_carried(const TaskHead& head, float (&acc)[128]) const {
    const float2* carry = carry_of(head, head.pass - 1U);
#pragma unroll
    for (int32_t n = 0; n < 64; ++n) {
      const float2 pair = __ldcg(carry + n * 32);  // past L1: another SM wrote it
      acc[2 * n] += pair.x;
      acc[2 * n + 1] += pair.y;
    }
  }
  __device__ __forceinline__ void carry_on(const TaskHead& head, const float (&acc)[128]) const {
    float2* carry = carry_of(head, head.pass);
#pragma unroll
    for (int32_t n = 0; n < 64; ++n) carry[n * 32] = {acc[2 * n], acc[2 * n + 1]};
    __syncwarp();  // before the lane that announces the end of the pass does
  }

  // Where 16 rows of a weight gradient's tile go.
  struct Target {
    const CUtensorMap* map;
    int32_t row;
  };
  __device__ __forceinline__ Target target_of(const TaskHead& head, int32_t row_in_tile) const {
    const int32_t row = head.m_tile * kBlockRows + row_in_tile;
    if (head.kind == TaskKind::kDownWgrad) return {map(&BackwardParams::ddown), row};
    const int32_t num_gate_tiles = ceil_div(static_cast<int32_t>(params.plan.shape.intermediate), kBlockRows);
    if (head.m_tile < num_gate_tiles) return {map(&BackwardParams::dgate), row};
    return {map(&BackwardParams::dup), row - num_gate_tiles * kBlockRows};
  }

  __device__ __forceinline__ void finish_wgrad(const TaskHead& head, int32_t row_in_tile, TileStore& store,
                                               const float (&acc)[128]) const {
    const Target target = target_of(head, row_in_tile);
    const int32_t first_column = head.n_tile * kTileN;
    if (!params.grads_in_fp32) {
      store_bf16(store, target.map, first_column, target.row, head.local_expert, acc);
    } else {
#pragma unroll
      for (int32_t part = 0; part < kTileN / 32; ++part) {
        store.store_fp32(target.map, params.accumulates, first_column + part * 32, target.row, head.local_expert,
                         [&](int32_t j, int32_t half) {
                           const int32_t n = 4 * (part * 4 + j) + 2 * half;
                           return float2{acc[n], acc[n + 1]};
                         });
      }
    }
  }

  // The weight gradient of an expert without rows.
  __device__ __forceinline__ void store_zeroes(const TaskHead& head, int32_t row_in_tile, TileStore& store) const {
    const Target target = target_of(head, row_in_tile);
    const int32_t box_columns = params.grads_in_fp32 ? 32 : 64;
#pragma unroll 1
    for (int32_t column = 0; column < kTileN; column += box_columns) {
      store.store(target.map, head.n_tile * kTileN + column, target.row, head.local_expert,
                  [](int32_t, int32_t) { return 0U; });
    }
  }
};

}  // namespace weft
