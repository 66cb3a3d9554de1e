// The task bodies of the layer, one file a stage: dispatch.cpp, gate_up.cpp, down.cpp, combine.cpp. A body computes one
// task on the data and knows nothing of tickets and flags (roles.hpp).
#pragma once

#include "reference/state.hpp"

namespace weft {

// dispatch.cpp: what a pull brings at one pool row, from its owner's staging. Backward pulls dy, and x if asked.
template <class Element, class Real>
void pull_row(const State<Element, Real>& state, int32_t row);

// gate_up.cpp: z = x W^T and SwiGLU; dx = dz W; dW = dz^T x.
template <class Element, class Real>
void gate_up_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task);
template <class Element, class Real>
void gate_up_dgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task);
template <class Element, class Real>
void gate_up_wgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task);
// z of one tile, rounded to the data dtype, into the pool of z: the forward's, and the recomputation's in backward.
template <class Element, class Real>
void compute_z(const State<Element, Real>& state, const TaskOrder& order, int32_t local_expert, PoolRows rows,
               PoolRows cols);

// down.cpp: o = a' W^T; u' = dy W and the SwiGLU derivative; dW = dy^T a'.
template <class Element, class Real>
void down_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task);
template <class Element, class Real>
void down_dgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task);
template <class Element, class Real>
void down_wgrad_tile(const State<Element, Real>& state, const TaskOrder& order, const MatrixTask& task);

// combine.cpp: the sum of an entry's rows, sent to its owner; and the owner's sum over ranks.
template <class Element, class Real>
void combine_entry(const State<Element, Real>& state, const TaskOrder& order, const Entry& entry);
template <class Element, class Real>
void sum_token(const State<Element, Real>& state, const TaskOrder& order, int32_t token);

}  // namespace weft

// Closes each stage file: its functions for the three pairs of data dtype and sum type.
#define WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE) \
  INSTANTIATE(Bf16, float)                   \
  INSTANTIATE(float, float)                  \
  INSTANTIATE(double, double)
