// Combine: the rows of a token are summed in fp32 and k order and rounded once. A warp of every CTA follows the matrix
// work in the order in which tokens complete; math warps join in when their tiles are done.
#pragma once

#include "cuda/ptx/warp.cuh"
#include "cuda/stage/load.cuh"

namespace weft {

inline constexpr int32_t kCombineBatch = 2;

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], const uint4& row) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int32_t n = 0; n < 4; ++n) {
    sum[2 * n] += ptx::low_bf16(words[n]);
    sum[2 * n + 1] += ptx::high_bf16(words[n]);
  }
}

// One warp sums the rows of an entry into `target` [H]; kChunks pieces a lane of kRowsAtOnce rows are in flight.
template <int32_t kChunks, int32_t kRowsAtOnce>
__device__ __forceinline__ void sum_rows(const ForwardParams& params, const Entry& entry, Bf16* target) {
  const int64_t hidden = params.plan.shape.hidden;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t* rows = params.plan.fan_rows + entry.fan_begin;
  for (int64_t first = lane * 8; first < hidden; first += kChunks * 256) {
    float sums[kChunks][8] = {};
    for (int32_t n = 0; n < entry.num_rows; n += kRowsAtOnce) {
      uint4 values[kRowsAtOnce][kChunks];
#pragma unroll
      for (int32_t r = 0; r < kRowsAtOnce; ++r) {
        const bool present = n + r < entry.num_rows;
        const Bf16* row = params.out + (present ? params.plan.physical_row(rows[n + r]) : 0) * hidden + first;
#pragma unroll
        for (int32_t c = 0; c < kChunks; ++c) {
          values[r][c] = present && first + c * 256 < hidden ? ptx::load_16(row + c * 256) : uint4{};
        }
      }
#pragma unroll
      for (int32_t r = 0; r < kRowsAtOnce; ++r) {
        if (n + r < entry.num_rows) {
#pragma unroll
          for (int32_t c = 0; c < kChunks; ++c) add_bf16x8(sums[c], values[r][c]);
        }
      }
    }
#pragma unroll
    for (int32_t c = 0; c < kChunks; ++c) {
      if (first + c * 256 >= hidden) continue;
      *reinterpret_cast<uint4*>(target + first + c * 256) =
          uint4{ptx::pack_bf16(sums[c][0], sums[c][1]), ptx::pack_bf16(sums[c][2], sums[c][3]),
                ptx::pack_bf16(sums[c][4], sums[c][5]), ptx::pack_bf16(sums[c][6], sums[c][7])};
    }
  }
}

// Tokens without a valid route are in no entry: their sum of nothing is written here, a token a lane.
__device__ __forceinline__ void zero_masked_tokens(const ForwardParams& params, int32_t first_token) {
  const Plan& plan = params.plan;
  const int64_t hidden = plan.shape.hidden;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  bool masked = first_token + lane < params.state->num_own_tokens;
  for (int32_t k = 0; k < plan.shape.top_k && masked; ++k) {
    masked = plan.route_row[plan.route_offset(0, first_token + lane) + k] < 0;
  }
  for (uint32_t lanes = __ballot_sync(~0U, masked); lanes != 0; lanes &= lanes - 1) {
    Bf16* row = params.y + (first_token + __ffs(static_cast<int32_t>(lanes)) - 1) * hidden;
    for (int64_t column = lane * 8; column < hidden; column += 256) *reinterpret_cast<uint4*>(row + column) = uint4{};
  }
}

template <int32_t kChunks, int32_t kRowsAtOnce>
__device__ inline void run_combine(const ForwardParams& params) {
  const Plan& plan = params.plan;
  const PassFlags& flags = params.flags.banks[0];
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t num_entries = plan.pass_entry_begin[1];
  const int32_t num_token_batches = ceil_div(params.state->num_own_tokens, 32);
  const auto out_tiles = static_cast<uint32_t>(ceil_div<int64_t>(plan.shape.hidden, kTileN) * kMathWarps);
  for (;;) {
    uint32_t claimed = 0;
    if (lane == 0) claimed = ptx::atom_add_relaxed_gpu(flags.comm_ticket, 1);
    const auto ticket = static_cast<int32_t>(__shfl_sync(~0U, claimed, 0));
    if (ticket < num_token_batches) {
      zero_masked_tokens(params, ticket * 32);
      continue;
    }
    const int32_t begin = (ticket - num_token_batches) * kCombineBatch;
    if (begin >= num_entries) return;
    for (int32_t position = begin; position < min_of(begin + kCombineBatch, num_entries); ++position) {
      const Entry entry = plan.entries[plan.combine_order[position]];
      bool ready = true;
      if (lane < entry.num_rows) {
        const int32_t block = plan.fan_rows[entry.fan_begin + lane] / kBlockRows % plan.shape.capacity_blocks;
        ready =
            wait_counter(params, &flags.out_ready[block], out_tiles, WaitTask::kCombine, FlagKind::kOutReady, block);
      }
      if (!__all_sync(~0U, ready)) return;
      sum_rows<kChunks, kRowsAtOnce>(params, entry, params.y + int64_t{entry.token} * plan.shape.hidden);
    }
  }
}

}  // namespace weft
