// Where a weight-gradient tile goes. One task owns a tile in a pass and passes follow one another, so even accumulation
// into a caller's buffer needs no atomics and has one order.
#pragma once

#include "reference/state.hpp"

namespace weft {

enum class WeightKind : int32_t { kGate = 0, kUp = 1, kDown = 2 };

template <class Out, class Real>
void write_gradient(Span2d<const Real> tile, Out* gradient, int64_t row, int64_t col, int64_t num_cols,
                    bool accumulate) {
  for (int64_t m = 0; m < tile.rows; ++m) {
    for (int64_t n = 0; n < tile.cols; ++n) {
      Out& out = gradient[(row + m) * num_cols + col + n];
      const Real sum = accumulate ? convert<Real>(out) + tile.at(m, n) : tile.at(m, n);
      out = convert<Out>(sum);
    }
  }
}

// Takes the tile's sum over this pass at (row, col) of the weight [num_rows, num_cols]. An expert that straddles passes
// carries its sum from one to the next in Real; the last pass writes the gradient.
template <class Element, class Real>
void finish_wgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task,
                       WeightKind kind, int64_t row, int64_t col, Span2d<Real> tile) {
  const LayerShape& shape = state.shape();
  const int64_t num_cols = kind == WeightKind::kDown ? shape.intermediate : shape.hidden;
  const int64_t weight_size = shape.intermediate * shape.hidden;
  const auto carry = [&](int32_t pass) {
    return state.workspace.wgrad_carry + ((pass % 2) * 3 + static_cast<int64_t>(kind)) * weight_size;
  };
  if (order.continues_from_earlier_pass(task.local_expert)) {
    const Real* earlier = carry(order.pass() - 1);
    for (int64_t m = 0; m < tile.rows; ++m) {
      for (int64_t n = 0; n < tile.cols; ++n) tile.at(m, n) += earlier[(row + m) * num_cols + col + n];
    }
  }
  if (order.continues_in_later_pass(task.local_expert)) {
    write_gradient<Real, Real>(tile, carry(order.pass()), row, col, num_cols, false);
    return;
  }
  const WeightGradients& gradients = state.gradients;
  void* base = kind == WeightKind::kGate ? gradients.gate : kind == WeightKind::kUp ? gradients.up : gradients.down;
  const int64_t stride = kind == WeightKind::kDown ? weight_size : gradients.gate_up_expert_stride;
  const int64_t offset = task.local_expert * stride;
  switch (gradients.dtype) {
    case WEFT_DTYPE_FP64:
      write_gradient<double, Real>(tile, static_cast<double*>(base) + offset, row, col, num_cols, gradients.accumulate);
      break;
    case WEFT_DTYPE_FP32:
      write_gradient<float, Real>(tile, static_cast<float*>(base) + offset, row, col, num_cols, gradients.accumulate);
      break;
    case WEFT_DTYPE_BF16:
      write_gradient<Bf16, Real>(tile, static_cast<Bf16*>(base) + offset, row, col, num_cols, gradients.accumulate);
      break;
  }
}

}  // namespace weft
