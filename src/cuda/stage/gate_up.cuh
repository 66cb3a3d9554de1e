// What forward and backward share of gate_up: z leaves a tile, whose accumulators hold 128 columns of g and the same
// 128 of u, rounded once.
#pragma once

#include "cuda/stage/math.cuh"

namespace weft {

inline constexpr int32_t kGateAcc = 0;  // first accumulator of g, and of u
inline constexpr int32_t kUpAcc = 64;

// Two neighbouring values, as backward reads them: columns 64 part + 8 j + {0, 1} of the upper or lower row.
__device__ __forceinline__ uint32_t packed_z(const float (&acc)[128], int32_t first_acc, int32_t part, int32_t j,
                                             int32_t half) {
  const int32_t n = first_acc + 4 * (part * 8 + j) + 2 * half;
  return ptx::pack_bf16(acc[n], acc[n + 1]);
}

// 64 columns of g and of u.
__device__ __forceinline__ void store_z(TileStore& store, const CUtensorMap* map, int32_t n_tile, int32_t part,
                                        int32_t first_row, const float (&acc)[128]) {
  const int32_t column = n_tile * kGateUpCols + part * kStoreCols;
  store.store(map, column, 0, first_row,
              [&](int32_t j, int32_t half) { return packed_z(acc, kGateAcc, part, j, half); });
  store.store(map, column, 1, first_row, [&](int32_t j, int32_t half) { return packed_z(acc, kUpAcc, part, j, half); });
}

}  // namespace weft
