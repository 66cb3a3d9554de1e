// Dispatch: rows are pulled from their owners into the pool, by plain 16-byte loads
// and stores: they do not stand in the way of the tiles' own bulk loads when a link is full.
#pragma once

#include "cuda/ptx/warp.cuh"
#include "cuda/stage/probe.cuh"
#include "cuda/stage/wait.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace weft {

// Pieces first, first + 32, ... of a row into as many rows of the pool; lane n knows where row n begins.
template <int32_t kPieces>
__device__ __forceinline__ void copy_to_rows(const uint4* source, uint4* pool, uint32_t first, uint32_t row_begin,
                                             int32_t num_rows, bool present) {
  uint4 values[kPieces];
#pragma unroll
  for (int32_t n = 0; n < kPieces; ++n) {
    if (present) values[n] = ptx::load_16(source + first + n * 32);
  }
#pragma unroll 1
  for (int32_t row = 0; row < num_rows; ++row) {
    uint4* target = pool + (__shfl_sync(~0U, row_begin, row) + first);
#pragma unroll
    for (int32_t n = 0; n < kPieces; ++n) {
      if (present) ptx::store_16(target + n * 32, values[n]);
    }
  }
}

// One warp pulls what it finds at the pool rows [begin, end), at most 32 of one block, as for_each_pulled_row says, and
// raises the counters of the rows' blocks.
template <class Probe>
__device__ __forceinline__ void pull_rows(const PersistentParams& params, const PassFlags& flags, int32_t begin,
                                          int32_t end, const Probe& probe) {
  constexpr int32_t kChunks = 8;  // 16-byte pieces a lane that are in flight
  const Plan& plan = params.plan;
  const auto row_chunks = static_cast<uint32_t>(plan.shape.hidden / 8);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t num_pulls = *plan.num_passes == 1 ? params.num_pulls : params.num_pulls_in_passes;

  // Lane n finds out what the n-th row brings: the rows of its entry, itself alone, or nothing.
  RouteRef route{kPaddingToken, 0, 0};
  int32_t num_brought = 0;
  int32_t fan_begin = 0;
  if (begin + lane < end) {
    route = plan.row_route[begin + lane];
    num_brought = 1;
    if (route.token != kPaddingToken && route.source != plan.shape.ep_rank) {
      const Entry& entry = plan.entries[plan.row_entry[begin + lane]];
      fan_begin = entry.fan_begin;
      num_brought = first_row(plan, entry) == begin + lane ? entry.num_rows : 0;
    }
  }
  // Lane n has the n-th row that `row` brings.
  const auto brought_by = [&](int32_t row, int32_t num_rows) {
    const int32_t fan = __shfl_sync(~0U, fan_begin, row - begin);
    return num_rows > 1 ? plan.fan_rows[fan + min_of(lane, num_rows - 1)] : row;
  };

#pragma unroll 1
  for (int32_t row = begin; row < end; ++row) {
    const int32_t num_rows = __shfl_sync(~0U, num_brought, row - begin);
    if (num_rows == 0) continue;
    const int32_t token = __shfl_sync(~0U, route.token, row - begin);
    const int32_t source_rank = __shfl_sync(~0U, int32_t{route.source}, row - begin);
    const uint32_t row_begin = static_cast<uint32_t>(pool_row(plan, brought_by(row, num_rows))) * row_chunks;
#pragma unroll 1
    for (int32_t pull = 0; pull < num_pulls; ++pull) {
      const auto* source = reinterpret_cast<const uint4*>(params.pulls[pull].source[source_rank]) +
                           static_cast<uint32_t>(token) * row_chunks;
      auto* pool = reinterpret_cast<uint4*>(params.pulls[pull].pool);
      uint32_t first = 0;
#pragma unroll 1
      for (; token != kPaddingToken && first + kChunks * 32 <= row_chunks; first += kChunks * 32) {
        copy_to_rows<kChunks>(source, pool, first + lane, row_begin, num_rows, true);
      }
#pragma unroll 1
      for (; first < row_chunks; first += 32) {
        if (token != kPaddingToken) {
          copy_to_rows<1>(source, pool, first + lane, row_begin, num_rows, first + lane < row_chunks);
        } else if (first + lane < row_chunks) {
          ptx::store_16(pool + row_begin + first + lane, uint4{});
        }
      }
    }
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
    const int32_t row = begin + __ffs(static_cast<int32_t>(rest)) - 1;
    const int32_t num_rows = __shfl_sync(~0U, num_brought, row - begin);
    const int32_t brought = brought_by(row, num_rows);
    if (lane < num_rows) ptx::red_add_relaxed_gpu(&flags.rows_ready[pool_row(plan, brought) / kBlockRows], 1);
  }
}

}  // namespace weft
