// Runs the passes of a launch on this rank: in one thread stage by stage (phased), or with a communication thread and
// matrix threads that overlap (overlapped.cpp). Both run the same Worker and task bodies and give the same bits.
#pragma once

#include "reference/state.hpp"

namespace weft {

struct RunOptions {
  int32_t num_matrix_workers;
  double deadline_s;
};

// Throw Error(WEFT_STALLED) when a peer stays away.
template <class Element, class Real>
void run_phased(State<Element, Real>& state, const RunOptions& options);
template <class Element, class Real>
void run_overlapped(State<Element, Real>& state, const RunOptions& options);

}  // namespace weft
