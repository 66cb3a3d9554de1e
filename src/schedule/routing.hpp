// Building the plan. The steps are functions of host and device over one source rank, one expert or one pool row, so
// that a kernel can run them in parallel; build_plan (routing.cpp) runs them in order on the host.
//
//   count_routes -> assign_segments -> place_routes -> list_entries
#pragma once

#include <cstdint>

#include "schedule/plan.hpp"

namespace weft {

// What every rank staged for this call, as this rank sees it in symmetric memory.
struct RoutingInputs {
  const int32_t* topk_idx[kMaxRanks];    // [num_tokens, K] of each rank
  const float* topk_weights[kMaxRanks];  // [num_tokens, K]
  int64_t num_tokens[kMaxRanks];
};

// The n-th source rank in the row order of an expert that lives on `rank`: itself first, then going round.
WEFT_HD inline int32_t nth_source(const LayerShape& shape, int32_t rank, int32_t n) {
  return (rank + n) % shape.ep_size;
}

WEFT_HD inline void count_routes(const Plan& plan, const RoutingInputs& inputs, int32_t source) {
  const LayerShape& shape = plan.shape;
  int32_t* counts = plan.route_counts + int64_t{source} * shape.num_experts;
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) counts[expert] = 0;
  const int64_t num_routes = inputs.num_tokens[source] * shape.top_k;
  for (int64_t route = 0; route < num_routes; ++route) {
    const int32_t expert = inputs.topk_idx[source][route];
    if (expert != kMaskedRoute) ++counts[expert];
  }
}

// Lays out the pool of `rank`: a segment for each (expert, source). Returns the pool's blocks.
WEFT_HD inline int32_t assign_segments(const Plan& plan, int32_t rank) {
  const LayerShape& shape = plan.shape;
  const int32_t first_expert = rank * shape.num_local_experts();
  int32_t block = 0;
  for (int32_t local = 0; local < shape.num_local_experts(); ++local) {
    const int32_t expert = first_expert + local;
    int32_t row = block * kBlockRows;
    const int32_t begin_row = row;
    for (int32_t n = 0; n < shape.ep_size; ++n) {
      const int64_t cell = int64_t{nth_source(shape, rank, n)} * shape.num_experts + expert;
      plan.segment_begin[cell] = row;
      row += plan.route_counts[cell];
    }
    if (rank == shape.ep_rank) {
      plan.expert_rows[local] = row - begin_row;
      plan.expert_block_begin[local] = block;
    }
    block += ceil_div(row - begin_row, kBlockRows);
  }
  if (rank == shape.ep_rank) plan.expert_block_begin[shape.num_local_experts()] = block;
  return block;
}

WEFT_HD inline int32_t passes_for(const LayerShape& shape, int32_t num_blocks) {
  return max_of(1, ceil_div(num_blocks, shape.capacity_blocks));
}

// Gives every route of `source` its pool row, in token and k order; `cursor` [E] counts up from the segments' begins.
WEFT_HD inline void place_routes(const Plan& plan, const RoutingInputs& inputs, int32_t source, int32_t* cursor) {
  const LayerShape& shape = plan.shape;
  const int32_t* segment_begin = plan.segment_begin + int64_t{source} * shape.num_experts;
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) cursor[expert] = segment_begin[expert];
  const int32_t first_local = shape.first_local_expert();
  const int32_t end_local = first_local + shape.num_local_experts();
  int64_t route = 0;
  for (int64_t token = 0; token < inputs.num_tokens[source]; ++token) {
    for (int32_t k = 0; k < shape.top_k; ++k, ++route) {
      const int32_t expert = inputs.topk_idx[source][route];
      const int32_t row = expert == kMaskedRoute ? -1 : cursor[expert]++;
      plan.route_row[plan.route_offset(source, token) + k] = row;
      if (row >= 0 && expert >= first_local && expert < end_local) {
        plan.row_route[row] = {static_cast<int32_t>(token), static_cast<int16_t>(source), static_cast<int16_t>(k)};
        plan.row_weight[row] = inputs.topk_weights[source][route];
      }
    }
  }
}

// Marks the rows behind an expert's last valid row.
WEFT_HD inline void mark_padding(const Plan& plan, int32_t local_expert) {
  const int32_t begin = plan.expert_block_begin[local_expert] * kBlockRows + plan.expert_rows[local_expert];
  const int32_t end = plan.expert_block_begin[local_expert + 1] * kBlockRows;
  for (int32_t row = begin; row < end; ++row) {
    plan.row_route[row] = {kPaddingToken, 0, 0};
    plan.row_weight[row] = 0.0F;
    plan.row_entry[row] = -1;
  }
}

// The ranks that hold a token's experts, as a bit mask; `topk_idx` are its K routes.
WEFT_HD inline uint64_t ranks_of_token(const LayerShape& shape, const int32_t* topk_idx) {
  uint64_t ranks = 0;
  for (int32_t k = 0; k < shape.top_k; ++k) {
    if (topk_idx[k] != kMaskedRoute) ranks |= uint64_t{1} << shape.rank_of_expert(topk_idx[k]);
  }
  return ranks;
}

// The ranks that send the token a partial row in `pass`; `route_rows` are the pool rows of its K routes.
WEFT_HD inline uint64_t ranks_of_token_in_pass(const Plan& plan, const int32_t* topk_idx, const int32_t* route_rows,
                                               int32_t pass) {
  uint64_t ranks = 0;
  for (int32_t k = 0; k < plan.shape.top_k; ++k) {
    if (topk_idx[k] == kMaskedRoute || plan.pass_of_row(route_rows[k]) != pass) continue;
    ranks |= uint64_t{1} << plan.shape.rank_of_expert(topk_idx[k]);
  }
  return ranks;
}

// Which of the token's partial rows comes from `rank`: ranks in ascending order, so the owner sums in rank order.
WEFT_HD inline int32_t slot_of_rank(uint64_t ranks, int32_t rank) {
  uint64_t below = ranks & ((uint64_t{1} << rank) - 1);
  int32_t slot = 0;
  for (; below != 0; below &= below - 1) ++slot;
  return slot;
}

// Runs all steps. Checks every index: throws Error naming rank, token and slot of one that is out of range. Takes time
// linear in the routes of all ranks.
void build_plan(const Plan& plan, const RoutingInputs& inputs);

}  // namespace weft
