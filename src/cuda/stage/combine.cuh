// Combine: the pool rows of an entry are summed in fp32 and k order and rounded once. With one rank the sum is the
// token's row of the result; with more it is a partial row that goes home to the token's owner, who adds the partial
// rows in rank order.
#pragma once

#include "cuda/ptx/warp.cuh"
#include "cuda/stage/schedule.cuh"
#include "schedule/routing.hpp"

namespace weft {

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], const uint4& row) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int32_t n = 0; n < 4; ++n) {
    sum[2 * n] += ptx::low_bf16(words[n]);
    sum[2 * n + 1] += ptx::high_bf16(words[n]);
  }
}

// One warp writes the sum of `num_rows` rows of `base` to `target` [H]; lane n knows where row n begins, in pieces of
// 16 bytes (counted in 32 bits: 64 GiB). kChunks pieces a lane of kRowsAtOnce rows are in flight.
template <int32_t kChunks, int32_t kRowsAtOnce>
__device__ __forceinline__ void sum_rows(const Bf16* base, uint32_t row_begin, int32_t num_rows, uint32_t row_chunks,
                                         Bf16* target) {
  const auto* chunks = reinterpret_cast<const uint4*>(base);
  auto* sum_chunks = reinterpret_cast<uint4*>(target);
#pragma unroll 1
  for (uint32_t first = threadIdx.x % 32; first / 32 * 32 < row_chunks; first += kChunks * 32) {
    float sums[kChunks][8] = {};
#pragma unroll 1
    for (int32_t n = 0; n < num_rows; n += kRowsAtOnce) {
      uint4 values[kRowsAtOnce][kChunks];
#pragma unroll
      for (int32_t r = 0; r < kRowsAtOnce; ++r) {
        const uint32_t begin = __shfl_sync(~0U, row_begin, n + r) + first;
#pragma unroll
        for (int32_t c = 0; c < kChunks; ++c) {
          const bool present = n + r < num_rows && first + c * 32 < row_chunks;
          values[r][c] = present ? ptx::load_16(chunks + begin + c * 32) : uint4{};
        }
      }
#pragma unroll
      for (int32_t r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
        for (int32_t c = 0; c < kChunks; ++c) add_bf16x8(sums[c], values[r][c]);
      }
    }
#pragma unroll
    for (int32_t c = 0; c < kChunks; ++c) {
      if (first + c * 32 >= row_chunks) continue;
      ptx::store_16(sum_chunks + first + c * 32,
                    uint4{ptx::pack_bf16(sums[c][0], sums[c][1]), ptx::pack_bf16(sums[c][2], sums[c][3]),
                          ptx::pack_bf16(sums[c][4], sums[c][5]), ptx::pack_bf16(sums[c][6], sums[c][7])});
    }
  }
  __syncwarp();
}

// The router gradient of pool row `row`, a lane a row: its parts, tile after tile.
__device__ __forceinline__ void send_router_gradient(const PersistentParams& params, const Entry& entry, int32_t row) {
  const Plan& plan = params.plan;
  const float* parts = params.dw_partial + int64_t{pool_row(plan, row)} * params.num_dw_tiles;
  float sum = 0;
#pragma unroll 1
  for (int32_t tile = 0; tile < params.num_dw_tiles; ++tile) sum += __ldcg(parts + tile);
  float* home = plan.shape.ep_size == 1 ? params.dtopk_weights : params.dtopk_home[entry.source];
  home[int64_t{entry.token} * plan.shape.top_k + plan.row_route[row].k] = sum;
}

// Whole warp; false after a stall.
template <int32_t kChunks, int32_t kRowsAtOnce>
__device__ __forceinline__ bool combine_entry(const PersistentParams& params, const Entry& entry, int32_t ticket) {
  const Plan& plan = params.plan;
  const LayerShape& shape = plan.shape;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto row_chunks = static_cast<uint32_t>(shape.hidden / 8);
  const PassFlags& flags = params.flags.banks[0];
  const bool has_rows = params.rows != nullptr;  // without them only router gradients go home
  uint32_t row_begin = 0;
  bool ready = true;
  if (lane < entry.num_rows) {
    const int32_t virtual_row = plan.fan_rows[entry.fan_begin + lane];
    const int32_t row = pool_row(plan, virtual_row);
    row_begin = static_cast<uint32_t>(row) * row_chunks;
    const int32_t block = row / kBlockRows;
    ready = wait_counter(params, has_rows ? &flags.out_ready[block] : &flags.mid_ready[block],
                         has_rows ? out_target(shape) : mid_target(shape, Direction::kBackward),
                         {WaitTask::kCombine, ticket, has_rows ? FlagKind::kOutReady : FlagKind::kMidReady, block, -1});
    if (ready && params.dw_partial != nullptr) send_router_gradient(params, entry, virtual_row);
  }
  if (!__all_sync(~0U, ready)) return false;
  const int64_t slot = int64_t{entry.token} * shape.slots_per_token() + entry.slot;
  const bool is_alone = shape.ep_size == 1;
  Bf16* target = is_alone ? params.result + int64_t{entry.token} * shape.hidden
                          : params.partial[entry.source] + slot * shape.hidden;
  if (has_rows) sum_rows<kChunks, kRowsAtOnce>(params.rows, row_begin, entry.num_rows, row_chunks, target);
  __syncwarp();  // the router gradients, before the flag
  if (!is_alone && lane == 0) ptx::st_release_sys(&params.arrived[entry.source][slot], params.state->epoch);
  return true;
}

// A token of this rank from its partial rows, which its experts' ranks have pushed. Whole warp; false after a stall.
template <int32_t kChunks, int32_t kRowsAtOnce>
__device__ __forceinline__ bool sum_token(const PersistentParams& params, int32_t token, int32_t ticket) {
  const Plan& plan = params.plan;
  const LayerShape& shape = plan.shape;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t* experts = params.topk_idx + plan.route_offset(shape.ep_rank, token);
  const uint64_t ranks = ranks_of_token(shape, experts);
  const int64_t first_slot = int64_t{token} * shape.slots_per_token();
  bool ready = true;
  for (int32_t peer = lane; peer < shape.ep_size && ready; peer += 32) {
    if ((ranks >> peer & 1) == 0) continue;
    const int64_t slot = first_slot + slot_of_rank(ranks, peer);
    ready = wait_counter<Scope::kSystem>(params, &params.arrived[shape.ep_rank][slot], params.state->epoch,
                                         {WaitTask::kSumTokens, ticket, FlagKind::kArrived, slot, peer});
  }
  if (!__all_sync(~0U, ready)) return false;
  if (params.dw_partial != nullptr && lane < shape.top_k) {
    const int64_t route = int64_t{token} * shape.top_k + lane;
    params.dtopk_weights[route] = experts[lane] < 0 ? 0 : __ldcg(params.dtopk_home[shape.ep_rank] + route);
  }
  if (params.rows == nullptr) return true;
  const auto row_chunks = static_cast<uint32_t>(shape.hidden / 8);
  sum_rows<kChunks, kRowsAtOnce>(params.partial[shape.ep_rank] + first_slot * shape.hidden,
                                 static_cast<uint32_t>(lane) * row_chunks, __popcll(ranks), row_chunks,
                                 params.result + int64_t{token} * shape.hidden);
  return true;
}

// With one rank, masked routes are in no entry: what they would have brought is written here, a token a lane - zero as
// their router gradient, and as the sum of a token that has no other routes.
__device__ __forceinline__ void zero_masked_tokens(const PersistentParams& params, int32_t begin, int32_t end) {
  const Plan& plan = params.plan;
  const int64_t hidden = plan.shape.hidden;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  bool masked = begin + lane < end;
  const bool is_own = masked;
#pragma unroll 1
  for (int32_t k = 0; k < plan.shape.top_k && is_own; ++k) {
    const int64_t route = plan.route_offset(0, begin + lane) + k;
    const bool is_masked = plan.route_row[route] < 0;
    if (is_masked && params.dw_partial != nullptr) params.dtopk_weights[route] = 0;
    masked = masked && is_masked;
  }
  if (params.rows == nullptr) return;
  for (uint32_t lanes = __ballot_sync(~0U, masked); lanes != 0; lanes &= lanes - 1) {
    Bf16* row = params.result + (begin + __ffs(static_cast<int32_t>(lanes)) - 1) * hidden;
    for (int64_t column = lane * 8; column < hidden; column += 256) ptx::store_16(row + column, uint4{});
  }
}

}  // namespace weft
