// Gathering: the load warps bring rows of tokens to a stage from where they lie, by cp.async. Nobody copies them for
// their experts first. Eight lanes bring a line of 128 bytes, a warp four lines at once, each of a run of rows of its
// own.
#pragma once

#include "cuda/launch/persistent.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace weft {

inline constexpr int32_t kLineLanes = 8;
inline constexpr int32_t kLineBytes = 128;
inline constexpr int32_t kRuns = kLoadWarps * 32 / kLineLanes;  // that the rows of a stage are cut into

// The run of a lane, of kRows in all.
template <int32_t kRows>
struct Run {
  static constexpr int32_t kLength = kRows / kRuns;
  static_assert(kLength % 8 == 0, "rows of a run are loaded four at a time, and the swizzle repeats every eight");

  // Its first row, behind the first of all.
  __device__ __forceinline__ static int32_t begin() {
    return static_cast<int32_t>(threadIdx.x % (kLoadWarps * 32)) / kLineLanes * kLength;
  }
};

// Where the tokens' rows of a lane's run begin, as in PlanScratch::row_begin.
template <int32_t kRows>
class RunLookup {
 public:
  // Of the pool rows from `first` on. The loads are on their way when this returns.
  __device__ __forceinline__ void begin(const uint32_t* row_begin, int32_t first) {
    const auto* begins = reinterpret_cast<const uint4*>(row_begin + first + Run<kRows>::begin());
#pragma unroll
    for (int32_t n = 0; n < Run<kRows>::kLength / 4; ++n) {
      const uint4 four = begins[n];
      of[4 * n] = four.x;
      of[4 * n + 1] = four.y;
      of[4 * n + 2] = four.z;
      of[4 * n + 3] = four.w;
    }
  }
  // Rows behind `last` are padding: they take the place of `last`, one of the same expert, whose values must not be
  // mixed with those of others.
  __device__ __forceinline__ void pad(const uint32_t* row_begin, int32_t first, int32_t last) {
    if (first + kRows - 1 <= last) return;
    const uint32_t of_last = row_begin[last];
#pragma unroll
    for (int32_t n = 0; n < Run<kRows>::kLength; ++n) {
      if (first + Run<kRows>::begin() + n > last) of[n] = of_last;
    }
  }

  uint32_t of[Run<kRows>::kLength];
};

// kChunks lines of each of kRows rows into as many tiles of 128-byte rows; `line` is that of the first token.
template <int32_t kChunks, int32_t kRows>
__device__ __forceinline__ void gather(uint8_t* tiles, const RunLookup<kRows>& rows, const Bf16* line) {
  const auto piece = static_cast<int32_t>(threadIdx.x % kLineLanes);
  const uint32_t target = ptx::shared_address(tiles) + static_cast<uint32_t>(Run<kRows>::begin() * kLineBytes);
  const uint4* first_piece = reinterpret_cast<const uint4*>(line) + piece;
#pragma unroll
  for (int32_t n = 0; n < Run<kRows>::kLength; ++n) {
    const uint4* source = ptx::piece_of(first_piece, rows.of[n]);
    const uint32_t place = target + static_cast<uint32_t>(swizzled(n, piece));
#pragma unroll
    for (int32_t chunk = 0; chunk < kChunks; ++chunk) {
      ptx::copy_async_16(place + static_cast<uint32_t>(chunk * kRows * kLineBytes), source + chunk * kLineLanes);
    }
  }
}

}  // namespace weft
