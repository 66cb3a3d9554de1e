// State of one launch on one rank, as the stage functions see it: sizes, weights, what peers mapped, and the pools in
// the caller's workspace. Element is the data dtype (what is staged, saved and returned), Real the type of sums.
//
// Pool rows are kept in Real before their rounding to an operand format: rounding belongs to the GEMM that reads them
// (product.hpp). What a kernel writes in the data dtype - z, o, dx rows, partial rows - is Element here too.
#pragma once

#include <cstdint>

#include "core/span2d.hpp"
#include "layout/symmetric.hpp"
#include "numeric/convert.hpp"
#include "numeric/recipe.hpp"
#include "reference/roles.hpp"

namespace weft {

// Says what the workspace of the last forward still holds.
struct WorkspaceTag {
  uint64_t generation;  // 0: nothing to rely on
};

template <class Element, class Real>
struct Workspace {
  WorkspaceTag* tag;
  LocalFlags flags;
  Plan plan;
  Real* x;            // [capacity, H] dispatched rows
  Element* z;         // [capacity, 2I] where the caller keeps none
  Real* act;          // [capacity, I] a' = w silu(g) u
  Element* out;       // [capacity, H] o in forward, dx rows in backward
  Real* dy;           // [capacity, H] dispatched rows
  Real* dz;           // [capacity, 2I]
  Real* dw_partial;   // [capacity, down_dgrad tiles] parts of <u', a>
  Real* token_sum;    // [max_tokens, H] y or dx of tokens whose rows fall into several passes
  Real* wgrad_carry;  // [2, 3, I, H] weight gradients of experts that straddle passes, by parity of the pass
};

template <class Element, class Real>
Workspace<Element, Real> carve_workspace(Carver& carver, const LayerShape& shape) {
  Workspace<Element, Real> workspace{};
  const int64_t rows = shape.capacity_rows();
  workspace.tag = carver.take<WorkspaceTag>(1);
  workspace.flags = carve_local_flags(carver, shape);
  workspace.plan = carve_plan(carver, shape);
  workspace.x = carver.take<Real>(rows * shape.hidden);
  workspace.z = carver.take<Element>(rows * 2 * shape.intermediate);
  workspace.act = carver.take<Real>(rows * shape.intermediate);
  workspace.out = carver.take<Element>(rows * shape.hidden);
  workspace.dy = carver.take<Real>(rows * shape.hidden);
  workspace.dz = carver.take<Real>(rows * 2 * shape.intermediate);
  workspace.dw_partial = carver.take<Real>(rows * ceil_div<int64_t>(shape.intermediate, kTileCols));
  if (shape.max_passes() > 1) {
    workspace.token_sum = carver.take<Real>(shape.max_tokens * shape.hidden);
    workspace.wgrad_carry = carver.take<Real>(2 * 3 * shape.intermediate * shape.hidden);
  }
  return workspace;
}

// Local experts' weights; gate_up [e, 2I, H] is gate and up with an expert stride of 2 I H.
template <class Element>
struct Weights {
  const Element* gate;
  const Element* up;
  const Element* down;
  int64_t gate_up_expert_stride;
};

// Where weight gradients go, in the layout of the weights; null: not wanted.
struct WeightGradients {
  void* gate = nullptr;
  void* up = nullptr;
  void* down = nullptr;
  int64_t gate_up_expert_stride = 0;
  weft_dtype dtype = WEFT_DTYPE_FP32;
  bool accumulate = false;
};

template <class Element, class Real>
struct State {
  const Recipe* recipe;
  Real clamp_limit;
  Launch launch;
  Workspace<Element, Real> workspace;
  Weights<Element> weights;
  const SymmetricData<Element>* peers;  // [ep_size]

  Element* saved;      // the caller's z of pass 0, or null
  bool rows_in_place;  // backward: x rows (and z, unless saved) of the forward still lie in the workspace
  bool pull_x;         // backward: x rows must be pulled again
  Element* result;     // [T, H] y or dx; null: not wanted
  float* dtopk_weights;
  WeightGradients gradients;

  const LayerShape& shape() const { return launch.plan.shape; }
  Span2d<Element> out() const { return dense(workspace.out, shape().capacity_rows(), shape().hidden); }
  bool forward() const { return launch.direction == Direction::kForward; }

  // z of the rows of a pass: the caller's buffer holds those of pass 0.
  Element* z_of_pass(int32_t pass) const { return pass == 0 && saved != nullptr ? saved : workspace.z; }
  // Backward has to compute z again before it can use it.
  bool recompute_z(int32_t pass) const { return !rows_in_place && !(pass == 0 && saved != nullptr); }

  Span2d<const Element> gate_weight(int32_t local_expert) const {
    return dense(weights.gate + local_expert * weights.gate_up_expert_stride, shape().intermediate, shape().hidden);
  }
  Span2d<const Element> up_weight(int32_t local_expert) const {
    return dense(weights.up + local_expert * weights.gate_up_expert_stride, shape().intermediate, shape().hidden);
  }
  Span2d<const Element> down_weight(int32_t local_expert) const {
    return dense(weights.down + local_expert * shape().hidden * shape().intermediate, shape().hidden,
                 shape().intermediate);
  }
};

// Valid rows of one block in the physical pool.
struct PoolRows {
  int64_t begin;
  int64_t count;
};

inline PoolRows rows_of_block(const TaskOrder& order, const MatrixTask& task) {
  return {int64_t{order.physical_block(task.m_tile)} * kBlockRows, order.valid_rows(task.local_expert, task.m_tile)};
}

// All of an expert's valid rows in the pass; they are contiguous in the pool.
inline PoolRows rows_of_expert(const TaskOrder& order, int32_t local_expert) {
  const BlockRange blocks = order.blocks(local_expert);
  if (blocks.size() == 0) return {0, 0};
  return {int64_t{order.physical_block(blocks.begin)} * kBlockRows,
          int64_t{blocks.size() - 1} * kBlockRows + order.valid_rows(local_expert, blocks.end - 1)};
}

// Columns of a tile: [begin, begin + count).
inline PoolRows cols_of_tile(const TaskOrder& order, TaskKind kind, int32_t n_tile, int64_t num_cols) {
  const int64_t begin = int64_t{n_tile} * order.tile_cols(kind);
  return {begin, min_of<int64_t>(order.tile_cols(kind), num_cols - begin)};
}

// Writes a tile of sums in the data dtype, each rounded once.
template <class Real, class Element>
void round_into(Span2d<Real> tile, Span2d<Element> rounded) {
  for (int64_t m = 0; m < tile.rows; ++m) {
    for (int64_t n = 0; n < tile.cols; ++n) rounded.at(m, n) = convert<Element>(tile.at(m, n));
  }
}

}  // namespace weft
