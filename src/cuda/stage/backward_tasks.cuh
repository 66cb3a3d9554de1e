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
static_assert(kZChunks < kClaimStages, "the load warp asks for the next task at a step, not behind the last");

// A weight gradient sums over the rows of its expert, up to the last half block that has a valid one: as far as
// down_dgrad has zeroed dz and a' of padding, whose tokens are those of a valid row.
__device__ __forceinline__ int32_t wgrad_steps(const ExpertRows& rows) { return ceil_div(rows.count, kTileK); }
__device__ __forceinline__ int32_t backward_steps(const Plan& plan, const TaskHead& head) {
  if (is_wgrad(head.kind)) return wgrad_steps(expert_rows_in_pass(plan, head.local_expert, head.pass));
  const LayerShape& shape = plan.shape;
  const int64_t depth = head.kind == TaskKind::kGateUpDgrad ? 2 * shape.intermediate : shape.hidden;
  return static_cast<int32_t>(depth / kTileK);
}

struct BackwardOperands {
  static constexpr bool kHasWgrads = true;
  const BackwardParams& params;
  bool in_one_pass;

  // B as four boxes of 64 columns and 64 rows, two a half of it.
  struct Tile : LoadTile {
    const CUtensorMap* map[2];  // of the halves
    int32_t at[3];              // the first box
    int32_t along_k[3];         // from step to step
    int32_t half_columns;       // from half to half
    bool along_rows;            // the second box of a half is 64 rows further, not 64 columns
  };
  __device__ __forceinline__ Tile tile(const TaskHead& head) const {
    const Plan& plan = params.plan;
    Tile tile{};
    static_cast<TaskHead&>(tile) = head;
    tile.num_steps = backward_steps(plan, head);
    tile.num_extra = head.kind == TaskKind::kDownDgrad ? kZChunks : 0;
    tile.first_row = head.m_tile * kBlockRows;
    tile.last_row = tile.first_row + max_of(1, int32_t{head.valid_rows}) - 1;
    tile.gathered = Gathered::kRows;
    tile.tokens = params.dy.rows();
    tile.at[0] = head.n_tile * kTileN;
    tile.at[2] = head.local_expert;
    tile.along_k[1] = kTileK;
    tile.half_columns = kTileN / 2;
    switch (head.kind) {
      case TaskKind::kGateUp:
        tile.tokens = params.x.rows();
        tile.map[0] = &params.gate;
        tile.map[1] = &params.up;
        tile.at[0] = 0;
        tile.at[1] = head.n_tile * kGateUpCols;
        tile.along_k[0] = kTileK;
        tile.along_k[1] = 0;
        tile.half_columns = 0;
        tile.along_rows = true;
        break;
      case TaskKind::kGateUpDgrad:
        tile.gathered = Gathered::kNothing;
        tile.first_row = pool_row(plan, tile.first_row);
        tile.map[0] = tile.map[1] = &params.gate;
        break;
      case TaskKind::kDownWgrad:
      case TaskKind::kGateUpWgrad: {
        const ExpertRows rows = expert_rows_in_pass(plan, head.local_expert, head.pass);
        tile.gathered = Gathered::kColumns;
        tile.first_row = rows.begin;
        tile.last_row = rows.begin + rows.count - 1;
        if (head.kind == TaskKind::kDownWgrad) {
          tile.map[0] = tile.map[1] = &params.act;
          tile.at[1] = pool_row(plan, rows.begin);
          tile.at[2] = 0;
        } else {
          const int32_t num_gate_tiles = wgrad_tiles(plan.shape).cols;
          const int32_t part = head.n_tile >= num_gate_tiles ? 1 : 0;
          tile.tokens = params.x.rows();
          tile.map[0] = tile.map[1] = &params.dz;
          tile.at[0] -= part * num_gate_tiles * kTileN;
          tile.at[1] = part;
          tile.at[2] = pool_row(plan, rows.begin);
          tile.along_k[1] = 0;
          tile.along_k[2] = kTileK;
        }
        tile.tokens += head.m_tile * kBlockRows;
        break;
      }
      default:
        tile.map[0] = tile.map[1] = &params.down;
    }
    return tile;
  }

  // Of gate_up_dgrad, the only one that is no rows of tokens.
  __device__ __forceinline__ void load_a(uint8_t* a, uint64_t* full, const Tile& tile, int32_t step) const {
    const auto intermediate = static_cast<int32_t>(params.plan.shape.intermediate);
    const int32_t part = step * kTileK >= intermediate ? 1 : 0;
    const int32_t column = step * kTileK - part * intermediate;
    ptx::tma_load(&params.dz, a, full, column, part, tile.first_row);
    ptx::tma_load(&params.dz, a + kChunkBytes, full, column, part, tile.first_row + kBlockRows / 2);
  }

  template <class Load>
  __device__ __forceinline__ void load_b(uint8_t* b, const Tile& tile, int32_t step, int32_t half, Load load) const {
    const CUtensorMap* map = half == 0 ? tile.map[0] : tile.map[1];
    const int32_t x = tile.at[0] + step * tile.along_k[0] + half * tile.half_columns;
    int32_t y = tile.at[1] + step * tile.along_k[1];
    const int32_t z = tile.at[2] + step * tile.along_k[2];
    if (tile.kind == TaskKind::kGateUpDgrad && y >= params.plan.shape.intermediate) {  // K goes on from gate to up
      map = &params.up;
      y -= static_cast<int32_t>(params.plan.shape.intermediate);
    }
    load(map, b, x, y, z);
    load(map, b + kChunkBytes, x + (tile.along_rows ? 0 : kChunkCols), y + (tile.along_rows ? kChunkCols : 0), z);
  }

  // 64 columns of g take the place of A, the same of u the first half of B's.
  __device__ __forceinline__ void load_extra(uint8_t* a, uint8_t* b, uint64_t* full, const Tile& tile,
                                             int32_t n) const {
    const int32_t column = tile.n_tile * kTileN + n * kChunkCols;
    const int32_t row = pool_row(params.plan, tile.first_row);
    ptx::mbarrier_arrive_expect_tx(full, 2 * kBlockRows * kChunkCols * 2);
    const CUtensorMap* z = in_one_pass ? &params.z : &params.z_in_passes;
    ptx::tma_load(z, a, full, column, 0, row);
    ptx::tma_load(z, b, full, column, 1, row);
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
  // A CTA without a tile of the pair raises nothing.
  __device__ __forceinline__ uint32_t* counter(const TaskHead& head) const {
    const PassFlags& flags = params.flags.banks[head.pass % kNumBanks];
    const int32_t block = head.m_tile % params.plan.shape.capacity_blocks;
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
        multiply<ptx::Major::kMN, ptx::Major::kMN>(stage, wgrad_steps(rows), warpgroup, true, publish, acc);
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
      multiply<ptx::Major::kK, ptx::Major::kK>(stage, backward_steps(params.plan, head), warpgroup, true, publish, acc);
      const int32_t first_row = pool_row(params.plan, head.m_tile * kBlockRows + row_in_block);
#pragma unroll
      for (int32_t part = 0; part < 2; ++part)
        store_z(store, map(&BackwardParams::dz_store), head.n_tile, part, first_row, acc);
    } else {
      multiply<ptx::Major::kK, ptx::Major::kMN>(stage, backward_steps(params.plan, head), warpgroup,
                                                head.kind == TaskKind::kDownDgrad, publish, acc);
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
    const int32_t tile = ((down ? 0 : tiles.cols) + head.n_tile) * tiles.rows + head.m_tile;
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

  // Where a warpgroup's part of a tile of dW_gate or dW_up begins. A tile of a weight gradient is 128 of H times 256 of
  // I, which of these two is the transpose.
  struct GateUpTarget {
    const CUtensorMap* map;
    int32_t column;
    int32_t row;
  };
  __device__ __forceinline__ GateUpTarget gate_up_target(const TaskHead& head, int32_t row_in_block) const {
    const int32_t num_gate_tiles = wgrad_tiles(params.plan.shape).cols;
    const bool is_up = head.n_tile >= num_gate_tiles;
    return {map(is_up ? &BackwardParams::dup : &BackwardParams::dgate),
            head.m_tile * kBlockRows + row_in_block / 64 * 64, (head.n_tile - (is_up ? num_gate_tiles : 0)) * kTileN};
  }

  __device__ __forceinline__ void finish_wgrad(const TaskHead& head, int32_t row_in_block, TileStore& store,
                                               const float (&acc)[128]) const {
    const int32_t expert = head.local_expert;
    const bool adds = params.accumulates;
    if (head.kind == TaskKind::kDownWgrad) {
      const CUtensorMap* target = map(&BackwardParams::ddown);
      const int32_t column = head.n_tile * kTileN;
      const int32_t row = head.m_tile * kBlockRows + row_in_block;
      if (!params.grads_in_fp32) return store_bf16(store, target, column, row, expert, acc);
#pragma unroll
      for (int32_t part = 0; part < kTileN / 32; ++part) {
        store.store_fp32(target, adds, column + part * 32, row, expert, part_of<32>(acc, part));
      }
    } else {
      const GateUpTarget target = gate_up_target(head, row_in_block);
      if (!params.grads_in_fp32) {
#pragma unroll
        for (int32_t part = 0; part < kTileN / kStoreCols; ++part) {
          store.store_transposed(target.map, target.column, target.row + part * kStoreCols, expert,
                                 packed_part(acc, part));
        }
      } else {
#pragma unroll
        for (int32_t part = 0; part < kTileN / 32; ++part) {
          store.store_fp32_transposed(target.map, adds, target.column, target.row + part * 32, expert,
                                      part_of<32>(acc, part));
        }
      }
    }
  }

  // The weight gradient of an expert without rows.
  __device__ __forceinline__ void store_zeroes(const TaskHead& head, int32_t row_in_block, TileStore& store) const {
    const auto zero = [](int32_t, int32_t) { return 0U; };
    const int32_t box_columns = params.grads_in_fp32 ? 32 : 64;
    if (head.kind == TaskKind::kDownWgrad) {
#pragma unroll 1
      for (int32_t column = 0; column < kTileN; column += box_columns) {
        store.store(map(&BackwardParams::ddown), head.n_tile * kTileN + column, head.m_tile * kBlockRows + row_in_block,
                    head.local_expert, zero);
      }
    } else {
      const GateUpTarget target = gate_up_target(head, row_in_block);
#pragma unroll 1
      for (int32_t row = row_in_block % 64; row < kTileN; row += 64) {
#pragma unroll 1
        for (int32_t column = 0; column < 64; column += box_columns) {
          store.store(target.map, target.column + column, target.row + row, head.local_expert, zero);
        }
      }
    }
  }
};

}  // namespace weft
