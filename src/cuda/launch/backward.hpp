// The fused backward kernel: its parameters and its launch. launch/params.cpp fills them; the plan kernel
// has run before it in the same stream.
#pragma once

#include <span>

#include "cuda/launch/persistent.hpp"

namespace weft {

struct BackwardParams : PersistentParams {
  // Tensor maps, all 3-d (columns, rows, experts or 1) unless said. What is loaded comes in boxes of 64 columns and 64
  // rows: half of a tile of 128 rows whose columns are K, or a chunk of a tile whose rows are K.
  CUtensorMap z;            // load [capacity, 2, I] as (I, 2, capacity), 128 rows
  CUtensorMap z_in_passes;  // likewise, in a call of several passes
  CUtensorMap act;          // load [capacity, I]
  CUtensorMap dz;           // load [capacity, 2, I] as (I, 2, capacity)
  CUtensorMap gate;         // load [e, I, H]
  CUtensorMap up;           // load [e, I, H]
  CUtensorMap down;         // load [e, H, I]
  CUtensorMap act_store;    // store [capacity, I], 16 rows
  CUtensorMap dz_store;     // store [capacity, 2, I] as (I, 2, capacity), 16 rows
  CUtensorMap rows_store;   // store [capacity, H], 16 rows
  CUtensorMap dgate;        // store [e, I, H], 16 rows; 64 columns in bf16, 32 in fp32
  CUtensorMap dup;          // likewise
  CUtensorMap ddown;        // likewise [e, H, I]
  float* dw_parts;          // [capacity, num_dw_tiles] what combine reads as dw_partial, if it is wanted
  float2* wgrad_carry;      // [2, tiles, warps, 16 rows of 256] sums on their way from pass to pass; null: one pass
  float clamp_limit;
  bool grads_in_fp32;
  bool accumulates;  // into weight gradients in fp32
};

// The tiles of an expert's weight gradients: of H and I for that of down, and the same twice for gate and up.
struct WgradTiles {
  int32_t rows;  // of H
  int32_t cols;  // of I

  WEFT_HD int32_t num_all() const { return 3 * rows * cols; }
};
WEFT_HD inline WgradTiles wgrad_tiles(const LayerShape& shape) {
  constexpr int32_t kCols = kHopperTiling.cols[static_cast<int32_t>(TaskKind::kDownWgrad)];
  static_assert(kHopperTiling.cols[static_cast<int32_t>(TaskKind::kGateUpWgrad)] == kCols);
  return {static_cast<int32_t>(ceil_div<int64_t>(shape.hidden, kBlockRows)),
          static_cast<int32_t>(ceil_div<int64_t>(shape.intermediate, kCols))};
}

// As load_forward.
int32_t load_backward();

// The ranks of one launch, each on num_sms SMs, an even number: one CTA an SM, in clusters of two. Throws
// Error(WEFT_INTERNAL) if the launch fails.
void launch_backward(std::span<const BackwardParams> ranks, int32_t num_sms, cudaStream_t stream);

}  // namespace weft
