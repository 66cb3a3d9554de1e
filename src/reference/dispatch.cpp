// Dispatch: a row crosses from its owner once a rank and fans out to the pool rows of its experts there.
#include "reference/stages.hpp"

namespace weft {
namespace {

// `staged` null: zeroes.
template <class Element, class Real>
void copy_row(const Plan& plan, const Element* staged, Real* pool, int32_t row) {
  const int64_t hidden = plan.shape.hidden;
  Real* target = pool + plan.physical_row(row) * hidden;
  for (int64_t h = 0; h < hidden; ++h) target[h] = staged == nullptr ? Real{0} : convert<Real>(staged[h]);
}

}  // namespace

template <class Element, class Real>
void pull_row(const State<Element, Real>& state, int32_t row) {
  const Plan& plan = state.launch.plan;
  const RouteRef route = plan.row_route[row];
  const auto staged = [&](const Element* rows) {
    return route.token == kPaddingToken ? nullptr : rows + int64_t{route.token} * plan.shape.hidden;
  };
  const SymmetricData<Element>& owner = state.peers[route.source];
  for_each_pulled_row(plan, row, [&](int32_t pulled) {
    if (state.pull_x) copy_row(plan, staged(owner.x), state.workspace.x, pulled);
    if (!state.forward()) copy_row(plan, staged(owner.dy), state.workspace.dy, pulled);
  });
}

#define INSTANTIATE(Element, Real) template void pull_row(const State<Element, Real>&, int32_t);
WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace weft
