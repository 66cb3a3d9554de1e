// LayerShape: the sizes of one layer on one rank, and every size that follows from them. Plain data for host and
// device.
#pragma once

#include <cstdint>

#include "core/annotations.hpp"
#include "core/math.hpp"

namespace weft {

inline constexpr int32_t kBlockRows = 128;  // rows of a pool block: the M of every tile, the unit of readiness
inline constexpr int32_t kTileCols = 128;   // columns of a tile: one scale group of blockwise fp8
inline constexpr int32_t kMaxRanks = 64;    // a set of ranks fits one 64-bit mask
inline constexpr int32_t kMaxTopK = 32;
inline constexpr int32_t kMaxParts = 2;  // parts of the columns of a result, each combined when it is complete
inline constexpr int32_t kMaskedRoute = -1;

struct LayerShape {
  int64_t hidden;
  int64_t intermediate;
  int32_t num_experts;
  int32_t top_k;
  int32_t ep_size;
  int32_t ep_rank;
  int64_t max_tokens;       // most tokens of one rank in one call
  int32_t capacity_blocks;  // pool blocks worked on in one pass

  WEFT_HD int32_t num_local_experts() const { return num_experts / ep_size; }
  WEFT_HD int32_t first_local_expert() const { return ep_rank * num_local_experts(); }
  WEFT_HD int32_t rank_of_expert(int32_t expert) const { return expert / num_local_experts(); }
  WEFT_HD int64_t capacity_rows() const { return int64_t{capacity_blocks} * kBlockRows; }

  // A token's routes touch at most this many ranks: the partial rows that combine can bring home for it.
  WEFT_HD int32_t slots_per_token() const { return min_of(top_k, ep_size); }

  // Under any routing at most this many routes and padded blocks fall on one rank.
  WEFT_HD int64_t max_routes() const { return int64_t{ep_size} * max_tokens * top_k; }
  WEFT_HD int64_t max_blocks() const { return max_routes() / kBlockRows + num_local_experts(); }
  WEFT_HD int64_t max_pool_rows() const { return max_blocks() * kBlockRows; }
  WEFT_HD int64_t max_passes() const { return max_of<int64_t>(1, ceil_div<int64_t>(max_blocks(), capacity_blocks)); }
};

}  // namespace weft
