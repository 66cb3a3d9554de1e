// Combine: a token's rows are summed where its experts live, in k order, and one row a (token, rank) goes home in the
// data dtype; the owner adds those in rank order and rounds once. Both orders are fixed, so the sum has one value.
#include "reference/stages.hpp"

namespace weft {

template <class Element, class Real>
void combine_entry(const State<Element, Real>& state, const TaskOrder& order, const Entry& entry) {
  const Plan& plan = state.launch.plan;
  const LayerShape& shape = plan.shape;
  const SymmetricData<Element>& owner = state.peers[entry.source];
  const int32_t* rows = plan.fan_rows + entry.fan_begin;
  if (state.forward() || order.work().dgrad) {
    const int64_t slot = int64_t{entry.token} * shape.slots_per_token() + entry.slot;
    Element* partial = owner.partial + slot * shape.hidden;
    for (int64_t h = 0; h < shape.hidden; ++h) {
      Real sum = 0;
      for (int32_t n = 0; n < entry.num_rows; ++n) {
        sum += convert<Real>(state.workspace.out[plan.physical_row(rows[n]) * shape.hidden + h]);
      }
      partial[h] = convert<Element>(sum);
    }
  }
  if (state.forward()) return;
  const int32_t num_tiles = order.num_n_tiles(TaskKind::kDownDgrad);
  for (int32_t n = 0; n < entry.num_rows; ++n) {
    const Real* parts = state.workspace.dw_partial + plan.physical_row(rows[n]) * num_tiles;
    Real dw = 0;
    for (int32_t tile = 0; tile < num_tiles; ++tile) dw += parts[tile];
    owner.dtopk_weights[int64_t{entry.token} * shape.top_k + plan.row_route[rows[n]].k] = static_cast<float>(dw);
  }
}

template <class Element, class Real>
void sum_token(const State<Element, Real>& state, const TaskOrder& order, int32_t token) {
  const Plan& plan = state.launch.plan;
  const LayerShape& shape = plan.shape;
  const SymmetricData<Element>& own = state.peers[shape.ep_rank];
  const int64_t first_route = int64_t{token} * shape.top_k;
  const int32_t* experts = state.launch.topk_idx + first_route;
  const int32_t* rows = plan.route_row + plan.route_offset(shape.ep_rank, token);
  const uint64_t senders = ranks_of_token_in_pass(plan, experts, rows, order.pass());
  // Between the first pass, which opens the sum, and the last, which writes it, most tokens have nothing to add.
  if (senders == 0 && order.pass() > 0 && !order.last_pass()) return;

  if (state.result != nullptr) {
    const uint64_t all = ranks_of_token(shape, experts);
    const Element* partial = own.partial + int64_t{token} * shape.slots_per_token() * shape.hidden;
    const bool one_pass = order.pass() == 0 && order.last_pass();
    Real* carried = one_pass ? nullptr : state.workspace.token_sum + int64_t{token} * shape.hidden;
    for (int64_t h = 0; h < shape.hidden; ++h) {
      Real sum = order.pass() == 0 ? Real{0} : carried[h];
      for (int32_t rank = 0; rank < shape.ep_size; ++rank) {
        if ((senders >> rank & 1) == 0) continue;
        sum += convert<Real>(partial[slot_of_rank(all, rank) * shape.hidden + h]);
      }
      if (order.last_pass()) {
        state.result[int64_t{token} * shape.hidden + h] = convert<Element>(sum);
      } else {
        carried[h] = sum;
      }
    }
  }
  if (state.dtopk_weights == nullptr) return;
  for (int32_t k = 0; k < shape.top_k; ++k) {
    const int64_t route = first_route + k;
    if (experts[k] == kMaskedRoute) {
      state.dtopk_weights[route] = 0;
    } else if (plan.pass_of_row(rows[k]) == order.pass()) {
      state.dtopk_weights[route] = own.dtopk_weights[route];
    }
  }
}

#define INSTANTIATE(Element, Real)                                                          \
  template void combine_entry(const State<Element, Real>&, const TaskOrder&, const Entry&); \
  template void sum_token(const State<Element, Real>&, const TaskOrder&, int32_t);
WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace weft
