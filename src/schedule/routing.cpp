// The serial host driver of the plan.
#include "schedule/routing.hpp"

#include "core/status.hpp"

namespace weft {
namespace {

void check_indices(const LayerShape& shape, const RoutingInputs& inputs, int32_t source) {
  const int64_t num_routes = inputs.num_tokens[source] * shape.top_k;
  for (int64_t route = 0; route < num_routes; ++route) {
    const int32_t expert = inputs.topk_idx[source][route];
    if (expert >= kMaskedRoute && expert < shape.num_experts) continue;
    throw Error(WEFT_INVALID_ARGUMENT, words("topk_idx of rank ", source, " at token ", route / shape.top_k, ", slot ",
                                             route % shape.top_k, " is ", expert, "; allowed: 0 to ",
                                             shape.num_experts - 1, ", or ", kMaskedRoute, " for a masked route"));
  }
}

// Opens entry `entry_idx` at its first row: it claims all rows of that row's token in this pass, in k order.
void open_entry(const Plan& plan, const RoutingInputs& inputs, int32_t entry_idx, int32_t first_row,
                int32_t fan_begin) {
  const LayerShape& shape = plan.shape;
  const RouteRef route = plan.row_route[first_row];
  const int32_t pass = plan.pass_of_row(first_row);
  const int32_t* experts = inputs.topk_idx[route.source] + int64_t{route.token} * shape.top_k;
  const int32_t* rows = plan.route_row + plan.route_offset(route.source, route.token);
  const int32_t first_local = shape.first_local_expert();
  const int32_t end_local = first_local + shape.num_local_experts();
  int32_t num_rows = 0;
  for (int32_t k = 0; k < shape.top_k; ++k) {
    if (experts[k] < first_local || experts[k] >= end_local || plan.pass_of_row(rows[k]) != pass) continue;
    plan.fan_rows[fan_begin + num_rows++] = rows[k];
    plan.row_entry[rows[k]] = entry_idx;
  }
  const int32_t slot = slot_of_rank(ranks_of_token(shape, experts), shape.ep_rank);
  plan.entries[entry_idx] = {route.token, route.source, fan_begin, num_rows, slot};
}

bool is_last_row(const Plan& plan, const Entry& entry, int32_t row) {
  for (int32_t n = 0; n < entry.num_rows; ++n) {
    if (plan.fan_rows[entry.fan_begin + n] > row) return false;
  }
  return true;
}

// Walks the pool once. An entry opens at its first row and joins the combine order at its last one.
void list_entries(const Plan& plan, const RoutingInputs& inputs) {
  constexpr int32_t kUnclaimed = -1;
  constexpr int32_t kPrefetchRows = 16;  // neighbours in the pool are strangers in their ranks' arrays
  int32_t num_entries = 0;
  int32_t num_fan_rows = 0;
  int32_t num_complete = 0;
  int32_t open_pass = 0;
  for (int32_t row = 0; row < plan.num_blocks() * kBlockRows; ++row) plan.row_entry[row] = kUnclaimed;
  plan.pass_entry_begin[0] = 0;
  for (int32_t local = 0; local < plan.shape.num_local_experts(); ++local) {
    const int32_t begin = plan.expert_block_begin[local] * kBlockRows;
    const int32_t end = begin + plan.expert_rows[local];
    for (int32_t row = begin; row < end; ++row) {
      const RouteRef& ahead = plan.row_route[min_of(row + kPrefetchRows, end - 1)];
      __builtin_prefetch(inputs.topk_idx[ahead.source] + int64_t{ahead.token} * plan.shape.top_k);
      __builtin_prefetch(plan.route_row + plan.route_offset(ahead.source, ahead.token));

      while (open_pass < plan.pass_of_row(row)) plan.pass_entry_begin[++open_pass] = num_entries;
      if (plan.row_entry[row] == kUnclaimed) {
        open_entry(plan, inputs, num_entries, row, num_fan_rows);
        num_fan_rows += plan.entries[num_entries++].num_rows;
      }
      const int32_t entry_idx = plan.row_entry[row];
      if (is_last_row(plan, plan.entries[entry_idx], row)) plan.combine_order[num_complete++] = entry_idx;
    }
  }
  while (open_pass < *plan.num_passes) plan.pass_entry_begin[++open_pass] = num_entries;
}

}  // namespace

void build_plan(const Plan& plan, const RoutingInputs& inputs) {
  const LayerShape& shape = plan.shape;
  for (int32_t source = 0; source < shape.ep_size; ++source) {
    check_indices(shape, inputs, source);
    count_routes(plan, inputs, source);
  }
  *plan.num_passes = 1;
  for (int32_t rank = 0; rank < shape.ep_size; ++rank) {
    *plan.num_passes = max_of(*plan.num_passes, passes_for(shape, assign_segments(plan, rank)));
  }
  for (int32_t source = 0; source < shape.ep_size; ++source) place_routes(plan, inputs, source, plan.cursor);
  for (int32_t local = 0; local < shape.num_local_experts(); ++local) mark_padding(plan, local);
  list_entries(plan, inputs);
}

}  // namespace weft
