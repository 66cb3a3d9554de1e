// Plan: where every route of a call goes. Built by each rank from all ranks' top-k indices, the same bits on every rank
// and in every run (stable prefix sums, no atomics), because row order decides summation order and so the result.
//
// A rank's routed rows form a pool: expert-major, each expert padded to whole blocks of kBlockRows. Inside an expert
// rows are ordered by source rank, beginning with the expert's own rank and going round (so that at any time each
// source is pulled by about one rank), then by token, then by k. The pool is virtual: pass p works on the window of
// blocks [p * capacity_blocks, (p + 1) * capacity_blocks), so any routing fits a fixed capacity and nothing is ever
// dropped.
//
// An entry is one (source rank, token, pass) with at least one row here: it is pulled once for all its rows, and
// these are summed before one partial row goes home.
#pragma once

#include <cstdint>

#include "core/annotations.hpp"
#include "layout/carver.hpp"
#include "layout/shape.hpp"

namespace weft {

struct RouteRef {
  int32_t token;   // kPaddingToken in a padding row
  int16_t source;  // rank that owns the token
  int16_t k;       // which of the token's top-k
};
inline constexpr int32_t kPaddingToken = -1;

struct Entry {
  int32_t token;
  int32_t source;
  int32_t fan_begin;  // its rows are fan_rows[fan_begin, fan_begin + num_rows), in k order
  int32_t num_rows;
  int32_t slot;  // which of the token's partial rows on its owner: the ordinal of this rank among the token's ranks
};

struct Plan {
  LayerShape shape;

  int32_t* num_passes;          // [1] the largest over all ranks: all take the same number of passes
  int32_t* route_counts;        // [ep_size, E] routes of each source rank to each expert
  int32_t* segment_begin;       // [ep_size, E] pool row, on the expert's rank, of the first row from each source rank
  int32_t* cursor;              // [E] scratch of place_routes
  int32_t* expert_rows;         // [e] valid rows of each local expert
  int32_t* expert_block_begin;  // [e + 1] first pool block of each local expert
  int32_t* route_row;           // [ep_size, max_tokens, K] pool row on the expert's rank; -1 where masked
  RouteRef* row_route;          // [max_pool_rows] the route of each row of this rank's pool
  float* row_weight;            // [max_pool_rows] its router weight
  int32_t* row_entry;           // [max_pool_rows] the entry it belongs to
  Entry* entries;               // [max_routes] by pass, then by first row
  int32_t* fan_rows;            // [max_routes] pool rows
  int32_t* combine_order;       // [max_routes] entries by pass, then by last row: the order in which they complete
  int32_t* pass_entry_begin;    // [max_passes + 1]

  WEFT_HD int64_t route_offset(int32_t source, int64_t token) const {
    return (int64_t{source} * shape.max_tokens + token) * shape.top_k;
  }
  WEFT_HD int32_t num_blocks() const { return expert_block_begin[shape.num_local_experts()]; }
  WEFT_HD int32_t pass_of_row(int32_t row) const { return row / kBlockRows / shape.capacity_blocks; }
  // Row of the physical pool that a virtual row occupies during its pass.
  WEFT_HD int64_t physical_row(int32_t row) const { return row % shape.capacity_rows(); }
};

WEFT_HD inline Plan carve_plan(Carver& carver, const LayerShape& shape) {
  Plan plan{};
  plan.shape = shape;
  const int64_t table = int64_t{shape.ep_size} * shape.num_experts;
  plan.num_passes = carver.take<int32_t>(1);
  plan.route_counts = carver.take<int32_t>(table);
  plan.segment_begin = carver.take<int32_t>(table);
  plan.cursor = carver.take<int32_t>(shape.num_experts);
  plan.expert_rows = carver.take<int32_t>(shape.num_local_experts());
  plan.expert_block_begin = carver.take<int32_t>(shape.num_local_experts() + 1);
  plan.route_row = carver.take<int32_t>(shape.max_routes());
  plan.row_route = carver.take<RouteRef>(shape.max_pool_rows());
  plan.row_weight = carver.take<float>(shape.max_pool_rows());
  plan.row_entry = carver.take<int32_t>(shape.max_pool_rows());
  plan.entries = carver.take<Entry>(shape.max_routes());
  plan.fan_rows = carver.take<int32_t>(shape.max_routes());
  plan.combine_order = carver.take<int32_t>(shape.max_routes());
  plan.pass_entry_begin = carver.take<int32_t>(shape.max_passes() + 1);
  return plan;
}

}  // namespace weft
