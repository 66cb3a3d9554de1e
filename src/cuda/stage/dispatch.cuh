// Dispatch among several ranks: rows of tokens are pulled from their owners, each once, by plain 16-byte loads and
// stores: they do not stand in the way of the tiles' own loads when a link is full.
#pragma once

#include "cuda/ptx/warp.cuh"
#include "cuda/stage/probe.cuh"
#include "cuda/stage/wait.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace weft {

// Pieces first, first + 32, ... of a row.
template <int32_t kPieces>
__device__ __forceinline__ void copy_pieces(const uint4* source, uint4* target, uint32_t first) {
  uint4 values[kPieces];
#pragma unroll
  for (int32_t n = 0; n < kPieces; ++n) values[n] = ptx::load_16(source + first + n * 32);
#pragma unroll
  for (int32_t n = 0; n < kPieces; ++n) ptx::store_16(target + first + n * 32, values[n]);
}

// One warp brings the row of a token.
__device__ __forceinline__ void pull_token(const LayerShape& shape, const TokenRows& rows, int32_t source_rank,
                                           int32_t token) {
  constexpr int32_t kInFlight = 8;  // 16-byte pieces a lane
  const auto row_pieces = static_cast<uint32_t>(shape.hidden / 8);
  const auto* source = reinterpret_cast<const uint4*>(rows.source[source_rank] + token * shape.hidden);
  auto* target = reinterpret_cast<uint4*>(rows.pulled + (source_rank * shape.max_tokens + token) * shape.hidden);
  uint32_t first = threadIdx.x % 32;
#pragma unroll 1
  for (; first + (kInFlight - 1) * 32 < row_pieces; first += kInFlight * 32) {
    copy_pieces<kInFlight>(source, target, first);
  }
#pragma unroll 1
  for (; first < row_pieces; first += 32) copy_pieces<1>(source, target, first);
}

// One warp pulls what it finds at the pool rows [begin, end), at most 32 of one block - with the first row of an entry
// its token, so that early blocks are soon complete - and raises the counters of the blocks of the entry's rows.
template <class Probe>
__device__ __forceinline__ void pull_rows(const PersistentParams& params, const PassFlags& flags, int32_t begin,
                                          int32_t end, const Probe& probe) {
  const Plan& plan = params.plan;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const bool pulls_x = *plan.num_passes == 1 ? params.pulls_x : params.pulls_x_in_passes;

  // Lane n finds out what the n-th row brings: the rows of its entry, itself alone, or nothing.
  RouteRef route{kPaddingToken, 0, 0};
  int32_t num_brought = 0;
  int32_t fan_begin = 0;
  bool pulls = false;
  if (begin + lane < end) {
    route = plan.row_route[begin + lane];
    num_brought = 1;
    if (route.token != kPaddingToken) {
      const Entry& entry = plan.entries[plan.row_entry[begin + lane]];
      fan_begin = entry.fan_begin;
      pulls = first_row(plan, entry) == begin + lane;
      num_brought = pulls ? entry.num_rows : 0;
    }
  }

#pragma unroll 1
  for (uint32_t rest = __ballot_sync(~0U, pulls); rest != 0; rest &= rest - 1) {
    const int32_t n = __ffs(static_cast<int32_t>(rest)) - 1;
    const int32_t token = __shfl_sync(~0U, route.token, n);
    const int32_t source_rank = __shfl_sync(~0U, int32_t{route.source}, n);
    if (pulls_x) pull_token(plan.shape, params.x, source_rank, token);
    if (params.dy.pulled != nullptr) pull_token(plan.shape, params.dy, source_rank, token);
  }

  probe.delay(ProbeSite::kAnnouncePull, begin);
  __syncwarp();
  // Rows that came alone lie in the block of the task.
  const uint32_t alone = __ballot_sync(~0U, num_brought == 1);
  const uint32_t fans = __ballot_sync(~0U, num_brought > 1);
  if (fans != 0) __threadfence();  // all lanes' stores, before any lane raises a counter
  if (lane == 0 && alone != 0) {
    ptx::red_add_release_gpu(&flags.rows_ready[pool_row(plan, begin) / kBlockRows],
                             static_cast<uint32_t>(__popc(alone)));
  }
#pragma unroll 1
  for (uint32_t rest = fans; rest != 0; rest &= rest - 1) {
    const int32_t n = __ffs(static_cast<int32_t>(rest)) - 1;
    const int32_t num_rows = __shfl_sync(~0U, num_brought, n);
    const int32_t fan = __shfl_sync(~0U, fan_begin, n);
    if (lane < num_rows) {
      ptx::red_add_relaxed_gpu(&flags.rows_ready[pool_row(plan, plan.fan_rows[fan + lane]) / kBlockRows], 1);
    }
  }
}

}  // namespace weft
