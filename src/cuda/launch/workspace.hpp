// The caller's workspace: what lies where in it. And how the kernels' work is cut, since sizes follow from that.
#pragma once

#include <cstdint>

#include "cuda/launch/backward.hpp"
#include "layout/carver.hpp"

namespace weft {

inline constexpr TaskChoice kForwardChoice{Direction::kForward, kForwardWork, kHopperTiling};
constexpr TaskChoice backward_choice(const Work& work) { return {Direction::kBackward, work, kHopperTiling}; }
inline constexpr Work kWholeBackward{true, true, true, true, Recompute::kAlways};

// Parts of a row's router gradient: one a down_dgrad tile.
inline int32_t num_dw_tiles(const LayerShape& shape) {
  constexpr int32_t kCols = kHopperTiling.cols[static_cast<int32_t>(TaskKind::kDownDgrad)];
  return ceil_div(static_cast<int32_t>(shape.intermediate), kCols);
}

// The caller's scratch on the device. No backward writes to what a second one of the same forward reads: x and z.
struct Workspace {
  LocalFlags flags;
  Plan plan;
  PlanScratch scratch;
  TaskTable forward_table;
  Bf16* x;           // several ranks: [ep_size, max_tokens, H] pulled rows
  Bf16* act;         // [capacity, I] a' = w silu(g) u
  Bf16* rows;        // [capacity, H] o in forward, dx rows in backward
  float* token_sum;  // [max_tokens, H] sums of own tokens, between passes

  // Of a backward only, and so behind all that a forward needs.
  TaskTable backward_table;
  Bf16* dy;             // several ranks: [ep_size, max_tokens, H] pulled rows
  Bf16* dz;             // [capacity, 2, I]; before, z that is made again
  float* dw_partial;    // [capacity, num_dw_tiles]
  float2* wgrad_carry;  // [2, num_wgrad_tiles, tile] sums of experts that straddle passes
};

Workspace carve_workspace(Carver& carver, const LayerShape& shape, Direction direction);

// Bytes of the largest array of rows of H. Kernels count in them in pieces of 16 bytes and 32 bits.
inline int64_t most_row_bytes(const LayerShape& shape) {
  return max_of(shape.capacity_rows(), shape.ep_size * shape.max_tokens) * shape.hidden *
         static_cast<int64_t>(sizeof(Bf16));
}
inline constexpr int64_t kMostRowBytes = int64_t{64} << 30;

}  // namespace weft
