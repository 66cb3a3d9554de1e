// The down projection: forward tile, data gradient with the SwiGLU derivative in its epilogue, weight gradient.
#include <vector>

#include "reference/product.hpp"
#include "reference/stages.hpp"
#include "reference/swiglu.hpp"
#include "reference/wgrad.hpp"

namespace weft {

template <class Element, class Real>
void down_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task) {
  const LayerShape& shape = state.shape();
  const GemmFormats formats = state.recipe->forward;
  const PoolRows rows = rows_of_block(order, task);
  const PoolRows cols = cols_of_tile(order, task.kind, task.n_tile, shape.hidden);
  const Span2d<const Real> act =
      dense<const Real>(state.workspace.act + rows.begin * shape.intermediate, rows.count, shape.intermediate);
  std::vector<Real> values(static_cast<size_t>(rows.count * cols.count));
  const Span2d<Real> tile = dense(values.data(), rows.count, cols.count);
  product<Real, Real, Element>(
      act, formats.activation,
      state.down_weight(task.local_expert).block(cols.begin, 0, cols.count, shape.intermediate), formats.other, tile);
  round_into(tile, state.out().block(rows.begin, cols.begin, rows.count, cols.count));
}

// u' = dy W_down; dw += <u', a>; da = w u'; dz = SwiGLU'(z) da; and a' once more, for the weight gradient.
template <class Element, class Real>
void down_dgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task) {
  const LayerShape& shape = state.shape();
  const int64_t intermediate = shape.intermediate;
  const GemmFormats formats = state.recipe->dgrad;
  const PoolRows rows = rows_of_block(order, task);
  const PoolRows cols = cols_of_tile(order, task.kind, task.n_tile, intermediate);
  if (state.recompute_z(order.pass())) compute_z(state, order, task.local_expert, rows, cols);

  const Span2d<const Real> dy =
      dense<const Real>(state.workspace.dy + rows.begin * shape.hidden, rows.count, shape.hidden);
  std::vector<Real> values(static_cast<size_t>(rows.count * cols.count));
  const Span2d<Real> u_prime = dense(values.data(), rows.count, cols.count);
  product<Real, Real, Element>(
      dy, formats.activation,
      state.down_weight(task.local_expert).transposed().block(cols.begin, 0, cols.count, shape.hidden), formats.other,
      u_prime);

  const Element* z = state.z_of_pass(order.pass());
  for (int64_t m = 0; m < rows.count; ++m) {
    const int64_t row = rows.begin + m;
    const auto weight = static_cast<Real>(state.launch.plan.row_weight[int64_t{task.m_tile} * kBlockRows + m]);
    const Element* gate_up = z + row * 2 * intermediate;
    Real* dz = state.workspace.dz + row * 2 * intermediate;
    Real dw = 0;
    for (int64_t n = 0; n < cols.count; ++n) {
      const int64_t col = cols.begin + n;
      const auto value =
          swiglu(convert<Real>(gate_up[col]), convert<Real>(gate_up[intermediate + col]), state.clamp_limit);
      const auto gradient = swiglu_gradient(value, weight * u_prime.at(m, n));
      dw += u_prime.at(m, n) * value.a;
      dz[col] = gradient.dg;
      dz[intermediate + col] = gradient.du;
      state.workspace.act[row * intermediate + col] = weight * value.a;
    }
    state.workspace.dw_partial[row * order.num_n_tiles(task.kind) + task.n_tile] = dw;
  }
}

template <class Element, class Real>
void down_wgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task) {
  const LayerShape& shape = state.shape();
  const GemmFormats formats = state.recipe->wgrad;
  const int64_t first_row = int64_t{task.m_tile} * kBlockRows;
  const int64_t num_rows = min_of<int64_t>(kBlockRows, shape.hidden - first_row);
  const PoolRows cols = cols_of_tile(order, task.kind, task.n_tile, shape.intermediate);
  const PoolRows rows = rows_of_expert(order, task.local_expert);
  const Span2d<const Real> dy =
      dense<const Real>(state.workspace.dy + rows.begin * shape.hidden, rows.count, shape.hidden);
  const Span2d<const Real> act =
      dense<const Real>(state.workspace.act + rows.begin * shape.intermediate, rows.count, shape.intermediate);
  std::vector<Real> values(static_cast<size_t>(num_rows * cols.count));
  const Span2d<Real> tile = dense(values.data(), num_rows, cols.count);
  product<Real, Real, Real>(dy.block(0, first_row, rows.count, num_rows).transposed(), formats.activation,
                            act.block(0, cols.begin, rows.count, cols.count).transposed(), formats.other, tile);
  finish_wgrad_tile(state, order, task, WeightKind::kDown, first_row, cols.begin, tile);
}

#define INSTANTIATE(Element, Real)                                                                 \
  template void down_tile(const State<Element, Real>&, const TaskOrder&, const MatrixTask&);       \
  template void down_dgrad_tile(const State<Element, Real>&, const TaskOrder&, const MatrixTask&); \
  template void down_wgrad_tile(const State<Element, Real>&, const TaskOrder&, const MatrixTask&);
WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace weft
