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

// A run of a row's 16-byte pieces: what one part of the columns is.
struct ChunkRange {
  uint32_t begin;
  uint32_t end;
};
__device__ __forceinline__ ChunkRange chunks_of_part(const LayerShape& shape, int32_t part, int32_t num_parts) {
  constexpr uint32_t kTileChunks = kTileN / 8;
  const auto begin = static_cast<uint32_t>(part_begin_tile(shape, part, num_parts));
  const auto end = static_cast<uint32_t>(part_begin_tile(shape, part + 1, num_parts));
  return {begin * kTileChunks, min_of(end * kTileChunks, static_cast<uint32_t>(shape.hidden / 8))};
}

// kChunks pieces a lane of kRows rows. All are loaded before the first is used, and none under a condition: it would
// wait for the one before it.
template <int32_t kRows, int32_t kChunks>
struct Pieces {
  uint4 values[kRows][kChunks];

  __device__ __forceinline__ Pieces(const uint4* chunks, uint32_t row_begin, int32_t first_row,
                                    const uint32_t (&chunk)[kChunks]) {
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      const uint32_t begin = __shfl_sync(~0U, row_begin, first_row + r);
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) values[r][c] = ptx::load_16(chunks + (begin + chunk[c]));
    }
  }
  __device__ __forceinline__ void add_to(float (&sum)[8], int32_t c) const {
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) add_bf16x8(sum, values[r][c]);
  }
};

__device__ __forceinline__ void store_sum(uint4* target, const float (&sum)[8]) {
  ptx::store_16(target, uint4{ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
                              ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])});
}

// The pieces of a lane, from its first one on; beyond the range its last one again, in vain.
template <int32_t kChunks>
__device__ __forceinline__ void pieces_from(uint32_t first, const ChunkRange& range, uint32_t (&chunk)[kChunks]) {
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c) chunk[c] = min_of(first + threadIdx.x % 32 + c * 32, range.end - 1);
}
__device__ __forceinline__ bool is_piece(uint32_t first, int32_t c, const ChunkRange& range) {
  return first + threadIdx.x % 32 + c * 32 < range.end;
}

// The sum of as few rows as are in flight at once.
template <int32_t kRows, int32_t kChunks>
__device__ __forceinline__ void sum_few_rows(const uint4* chunks, uint32_t row_begin, const ChunkRange& range,
                                             uint4* target) {
#pragma unroll 1
  for (uint32_t first = range.begin; first < range.end; first += kChunks * 32) {
    uint32_t chunk[kChunks];
    pieces_from(first, range, chunk);
    const Pieces<kRows, kChunks> pieces(chunks, row_begin, 0, chunk);
#pragma unroll
    for (int32_t c = 0; c < kChunks; ++c) {
      float sum[8] = {};
      pieces.add_to(sum, c);
      if (is_piece(first, c, range)) store_sum(target + chunk[c], sum);
    }
  }
}

// The sum of any number of rows.
template <int32_t kChunks>
__device__ __forceinline__ void sum_many_rows(const uint4* chunks, uint32_t row_begin, int32_t num_rows,
                                              const ChunkRange& range, uint4* target) {
#pragma unroll 1
  for (uint32_t first = range.begin; first < range.end; first += kChunks * 32) {
    uint32_t chunk[kChunks];
    pieces_from(first, range, chunk);
    float sums[kChunks][8] = {};
    const auto add = [&]<int32_t kRows>(int32_t row) {
      const Pieces<kRows, kChunks> pieces(chunks, row_begin, row, chunk);
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) pieces.add_to(sums[c], c);
    };
    int32_t row = 0;
#pragma unroll 1
    for (; row + 8 <= num_rows; row += 8) add.template operator()<8>(row);
#pragma unroll 1
    for (; row + 2 <= num_rows; row += 2) add.template operator()<2>(row);
    if (row < num_rows) add.template operator()<1>(row);
#pragma unroll
    for (int32_t c = 0; c < kChunks; ++c) {
      if (is_piece(first, c, range)) store_sum(target + chunk[c], sums[c]);
    }
  }
}

// One warp writes the sum of `num_rows` rows of `base` to `target` [H]; lane n knows where row n begins, in pieces of
// 16 bytes (counted in 32 bits: 64 GiB). Sums wait for memory rather than for its bandwidth, so of fewer rows more
// pieces are in flight. kChunks: pieces a lane of more than four rows.
template <int32_t kChunks>
__device__ __forceinline__ void sum_rows(const Bf16* base, uint32_t row_begin, int32_t num_rows,
                                         const ChunkRange& range, Bf16* target) {
  constexpr int32_t kScale = kChunks > 1 ? 2 : 1;
  const auto* chunks = reinterpret_cast<const uint4*>(base);
  auto* sums = reinterpret_cast<uint4*>(target);
  if (num_rows == 1) {
    sum_few_rows<1, 8>(chunks, row_begin, range, sums);
  } else if (num_rows == 2) {
    sum_few_rows<2, 4 * kScale>(chunks, row_begin, range, sums);
  } else if (num_rows == 3) {
    sum_few_rows<3, 2 * kScale>(chunks, row_begin, range, sums);
  } else if (num_rows == 4) {
    sum_few_rows<4, 2 * kScale>(chunks, row_begin, range, sums);
  } else {
    sum_many_rows<kChunks>(chunks, row_begin, num_rows, range, sums);
  }
  __syncwarp();
}

// What a communication warp works on: one pass.
struct CommPass {
  const PersistentParams& params;
  const PassFlags& flags;
  uint32_t epoch;
  int32_t pass;
  int32_t num_parts;
};

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
template <int32_t kChunks>
__device__ __forceinline__ bool combine_entry(const CommPass& comm, const Entry& entry, int32_t part, int32_t ticket) {
  const PersistentParams& params = comm.params;
  const Plan& plan = params.plan;
  const LayerShape& shape = plan.shape;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const bool has_rows = params.rows != nullptr;  // without them only router gradients go home
  uint32_t row_begin = 0;
  bool ready = true;
  if (lane < entry.num_rows) {
    const int32_t virtual_row = plan.fan_rows[entry.fan_begin + lane];
    const int32_t row = pool_row(plan, virtual_row);
    row_begin = static_cast<uint32_t>(row) * static_cast<uint32_t>(shape.hidden / 8);
    const int32_t flag = part * shape.capacity_blocks + row / kBlockRows;
    ready = wait_counter(params, has_rows ? &comm.flags.out_ready[flag] : &comm.flags.mid_ready[flag],
                         has_rows ? out_target(shape, part, comm.num_parts) : mid_target(shape, Direction::kBackward),
                         {WaitTask::kCombine, ticket, has_rows ? FlagKind::kOutReady : FlagKind::kMidReady, flag, -1});
    if (ready && params.dw_partial != nullptr) send_router_gradient(params, entry, virtual_row);
  }
  if (!__all_sync(~0U, ready)) return false;
  const int64_t slot = int64_t{entry.token} * shape.slots_per_token() + entry.slot;
  const bool is_alone = shape.ep_size == 1;
  Bf16* target = is_alone ? params.result + int64_t{entry.token} * shape.hidden
                          : params.partial[entry.source] + slot * shape.hidden;
  if (has_rows) {
    sum_rows<kChunks>(params.rows, row_begin, entry.num_rows, chunks_of_part(shape, part, comm.num_parts), target);
  }
  __syncwarp();  // the router gradients, before the flag
  if (!is_alone && lane == 0) {
    const int64_t first_flag = part * shape.max_tokens * shape.slots_per_token();
    ptx::st_release_sys(&params.arrived[entry.source][first_flag + slot], comm.epoch);
  }
  return true;
}

// Adds up `num_slots` rows in order, after what earlier passes have left in `carried`; writes the sum to `carried` or,
// if it is complete, to `target`.
__device__ __forceinline__ void carry_sum(const Bf16* slots, uint32_t slot_begin, int32_t num_slots,
                                          uint32_t row_chunks, const ChunkRange& range, float* carried, bool opens,
                                          bool completes, Bf16* target) {
  const auto* chunks = reinterpret_cast<const uint4*>(slots);
#pragma unroll 1
  for (uint32_t first = range.begin; first < range.end; first += 32) {
    const uint32_t chunk = first + threadIdx.x % 32;
    const bool present = chunk < range.end;
    float sums[8] = {};
    if (present && !opens) {
#pragma unroll
      for (int32_t n = 0; n < 8; ++n) sums[n] = carried[chunk * 8 + n];
    }
#pragma unroll 1
    for (int32_t n = 0; n < num_slots; ++n) {
      const uint32_t begin = __shfl_sync(~0U, slot_begin, n) * row_chunks;
      if (present) add_bf16x8(sums, ptx::load_16(chunks + begin + chunk));
    }
    if (present && completes) {
      store_sum(reinterpret_cast<uint4*>(target) + chunk, sums);
    } else if (present) {
#pragma unroll
      for (int32_t n = 0; n < 8; ++n) carried[chunk * 8 + n] = sums[n];
    }
  }
  __syncwarp();
}

// A token of this rank from the partial rows that its experts' ranks have pushed in this pass. Whole warp; false after
// a stall.
template <int32_t kChunks>
__device__ __forceinline__ bool sum_token(const CommPass& comm, int32_t token, int32_t part, int32_t ticket) {
  const PersistentParams& params = comm.params;
  const Plan& plan = params.plan;
  const LayerShape& shape = plan.shape;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t first_route = plan.route_offset(shape.ep_rank, token);
  const int32_t* experts = params.topk_idx + first_route;
  const uint64_t ranks = ranks_of_token(shape, experts);
  const bool opens = comm.pass == 0;
  const bool completes = comm.pass + 1 == *plan.num_passes;
  const bool one_pass = opens && completes;
  const uint64_t senders =
      one_pass ? ranks : ranks_of_token_in_pass(plan, experts, plan.route_row + first_route, comm.pass);
  // Between the first pass, which opens the sum, and the last, which writes it, most tokens have nothing to add.
  if (senders == 0 && !opens && !completes) return true;
  const int64_t first_slot = int64_t{token} * shape.slots_per_token();
  const int64_t first_flag = part * shape.max_tokens * shape.slots_per_token() + first_slot;
  bool ready = true;
  int32_t num_slots = 0;
  uint32_t own_slot = 0;  // lane n has the n-th sender's
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    if ((senders >> peer & 1) == 0) continue;
    if (lane == num_slots) {
      own_slot = static_cast<uint32_t>(slot_of_rank(ranks, peer));
      ready =
          wait_counter<Scope::kSystem>(params, &params.arrived[shape.ep_rank][first_flag + own_slot], comm.epoch,
                                       {WaitTask::kSumTokens, ticket, FlagKind::kArrived, first_slot + own_slot, peer});
    }
    ++num_slots;
  }
  if (!__all_sync(~0U, ready)) return false;
  if (completes && params.dw_partial != nullptr && lane < shape.top_k) {
    const int64_t route = int64_t{token} * shape.top_k + lane;
    params.dtopk_weights[route] = experts[lane] < 0 ? 0 : __ldcg(params.dtopk_home[shape.ep_rank] + route);
  }
  if (params.rows == nullptr) return true;
  const auto row_chunks = static_cast<uint32_t>(shape.hidden / 8);
  const ChunkRange range = chunks_of_part(shape, part, comm.num_parts);
  const Bf16* slots = params.partial[shape.ep_rank] + first_slot * shape.hidden;
  Bf16* target = params.result + int64_t{token} * shape.hidden;
  if (one_pass) {
    sum_rows<kChunks>(slots, own_slot * row_chunks, num_slots, range, target);
  } else {
    carry_sum(slots, own_slot, num_slots, row_chunks, range, params.token_sum + int64_t{token} * shape.hidden, opens,
              completes, target);
  }
  return true;
}

// With one rank, masked routes are in no entry: what they would have brought is written here, a token a lane - zero as
// their router gradient, and as the sum of a token that has no other routes.
__device__ __forceinline__ void zero_masked_tokens(const PersistentParams& params, int32_t begin, int32_t end) {
  const Plan& plan = params.plan;
  const auto row_chunks = static_cast<uint32_t>(plan.shape.hidden / 8);
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
    const int64_t token = begin + __ffs(static_cast<int32_t>(lanes)) - 1;
    auto* row = reinterpret_cast<uint4*>(params.result + token * plan.shape.hidden);
    for (uint32_t chunk = threadIdx.x % 32; chunk < row_chunks; chunk += 32) ptx::store_16(row + chunk, uint4{});
  }
}

}  // namespace weft
