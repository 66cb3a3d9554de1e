// The gate/up projection: forward tile with SwiGLU in its epilogue, data gradient and weight gradient.
#include <vector>

#include "reference/product.hpp"
#include "reference/stages.hpp"
#include "reference/swiglu.hpp"
#include "reference/wgrad.hpp"

namespace weft {

template <class Element, class Real>
void compute_z(const State<Element, Real>& state, const TaskOrder& order, int32_t local_expert, PoolRows rows,
               PoolRows cols) {
  const LayerShape& shape = state.shape();
  const GemmFormats formats = state.recipe->forward;
  const Span2d<const Real> x =
      dense<const Real>(state.workspace.x + rows.begin * shape.hidden, rows.count, shape.hidden);
  const Span2d<Element> z =
      dense(state.z_of_pass(order.pass()) + rows.begin * 2 * shape.intermediate, rows.count, 2 * shape.intermediate);
  std::vector<Real> values(static_cast<size_t>(rows.count * cols.count));
  const Span2d<Real> tile = dense(values.data(), rows.count, cols.count);
  for (const bool is_up : {false, true}) {
    const Span2d<const Element> weight = is_up ? state.up_weight(local_expert) : state.gate_weight(local_expert);
    product<Real, Real, Element>(x, formats.activation, weight.block(cols.begin, 0, cols.count, shape.hidden),
                                 formats.other, tile);
    const int64_t first_col = cols.begin + (is_up ? shape.intermediate : 0);
    round_into(tile, z.block(0, first_col, rows.count, cols.count));
  }
}

template <class Element, class Real>
void gate_up_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task) {
  const int64_t intermediate = state.shape().intermediate;
  const PoolRows rows = rows_of_block(order, task);
  const PoolRows cols = cols_of_tile(order, task.kind, task.n_tile, intermediate);
  compute_z(state, order, task.local_expert, rows, cols);
  const Element* z = state.z_of_pass(order.pass());
  for (int64_t m = 0; m < rows.count; ++m) {
    const int64_t row = rows.begin + m;
    const auto weight = static_cast<Real>(state.launch.plan.row_weight[int64_t{task.m_tile} * kBlockRows + m]);
    for (int64_t n = cols.begin; n < cols.begin + cols.count; ++n) {
      const Element* gate_up = z + row * 2 * intermediate;
      const auto value = swiglu(convert<Real>(gate_up[n]), convert<Real>(gate_up[intermediate + n]), state.clamp_limit);
      state.workspace.act[row * intermediate + n] = weight * value.a;
    }
  }
}

// dx = dz_gate W_gate + dz_up W_up, one contraction over 2I.
template <class Element, class Real>
void gate_up_dgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task) {
  const LayerShape& shape = state.shape();
  const GemmFormats formats = state.recipe->dgrad;
  const PoolRows rows = rows_of_block(order, task);
  const PoolRows cols = cols_of_tile(order, task.kind, task.n_tile, shape.hidden);
  const Span2d<const Real> dz =
      dense<const Real>(state.workspace.dz + rows.begin * 2 * shape.intermediate, rows.count, 2 * shape.intermediate);
  std::vector<Real> values(static_cast<size_t>(rows.count * cols.count));
  const Span2d<Real> tile = dense(values.data(), rows.count, cols.count);
  for (const bool is_up : {false, true}) {
    const Span2d<const Element> weight =
        (is_up ? state.up_weight(task.local_expert) : state.gate_weight(task.local_expert)).transposed();
    product<Real, Real, Element>(dz.block(0, is_up ? shape.intermediate : 0, rows.count, shape.intermediate),
                                 formats.activation, weight.block(cols.begin, 0, cols.count, shape.intermediate),
                                 formats.other, tile, is_up ? Accumulate::kAdd : Accumulate::kOverwrite);
  }
  round_into(tile, state.out().block(rows.begin, cols.begin, rows.count, cols.count));
}

template <class Element, class Real>
void gate_up_wgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task) {
  const LayerShape& shape = state.shape();
  const GemmFormats formats = state.recipe->wgrad;
  const int32_t tiles = order.num_n_tiles(task.kind) / 2;
  const bool is_up = task.n_tile >= tiles;
  const PoolRows weight_rows = cols_of_tile(order, task.kind, task.n_tile % tiles, shape.intermediate);
  const int64_t first_col = int64_t{task.m_tile} * kBlockRows;
  const int64_t num_cols = min_of<int64_t>(kBlockRows, shape.hidden - first_col);
  const PoolRows rows = rows_of_expert(order, task.local_expert);
  const int64_t z_cols = 2 * shape.intermediate;
  const Span2d<const Real> dz = dense<const Real>(state.workspace.dz + rows.begin * z_cols, rows.count, z_cols);
  const Span2d<const Real> x =
      dense<const Real>(state.workspace.x + rows.begin * shape.hidden, rows.count, shape.hidden);
  std::vector<Real> values(static_cast<size_t>(weight_rows.count * num_cols));
  const Span2d<Real> tile = dense(values.data(), weight_rows.count, num_cols);
  const int64_t first_z_col = weight_rows.begin + (is_up ? shape.intermediate : 0);
  product<Real, Real, Real>(dz.block(0, first_z_col, rows.count, weight_rows.count).transposed(), formats.activation,
                            x.block(0, first_col, rows.count, num_cols).transposed(), formats.other, tile);
  finish_wgrad_tile(state, order, task, is_up ? WeightKind::kUp : WeightKind::kGate, weight_rows.begin, first_col,
                    tile);
}

#define INSTANTIATE(Element, Real)                                                                     \
  template void compute_z(const State<Element, Real>&, const TaskOrder&, int32_t, PoolRows, PoolRows); \
  template void gate_up_tile(const State<Element, Real>&, const TaskOrder&, const MatrixTask&);        \
  template void gate_up_dgrad_tile(const State<Element, Real>&, const TaskOrder&, const MatrixTask&);  \
  template void gate_up_wgrad_tile(const State<Element, Real>&, const TaskOrder&, const MatrixTask&);
WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace weft
