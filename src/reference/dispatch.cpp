// Dispatch: a row crosses from its owner once a rank and fans out to the pool rows of its experts there.
#include "reference/stages.hpp"

namespace weft {
namespace {

template <class Element, class Real>
void fan_out(const State<Element, Real>& state, const Entry& entry, const Element* staged, Real* pool) {
  const Plan& plan = state.launch.plan;
  const int64_t hidden = plan.shape.hidden;
  const Element* source = staged + int64_t{entry.token} * hidden;
  for (int32_t n = 0; n < entry.num_rows; ++n) {
    Real* row = pool + plan.physical_row(plan.fan_rows[entry.fan_begin + n]) * hidden;
    for (int64_t h = 0; h < hidden; ++h) row[h] = convert<Real>(source[h]);
  }
}

}  // namespace

template <class Element, class Real>
void pull_entry(const State<Element, Real>& state, const Entry& entry) {
  const SymmetricData<Element>& owner = state.peers[entry.source];
  if (state.pull_x) fan_out(state, entry, owner.x, state.workspace.x);
  if (!state.forward()) fan_out(state, entry, owner.dy, state.workspace.dy);
}

#define INSTANTIATE(Element, Real) template void pull_entry(const State<Element, Real>&, const Entry&);
WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace weft
