// What tools ask of the calls of this process (include/weft/debug.h, and the schedule), set by one op for all that
// follow, and the count of backwards by their source. Both are the process's: a backward runs on a thread of autograd's
// own, and its op was recorded before.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>

#include "weft/weft.h"

namespace weft_torch {

struct Debug {
  weft_schedule schedule = WEFT_SCHEDULE_AUTO;
  weft_debug options{};  // of the first call; each further one has the next delay_seed
  std::optional<torch::stable::Tensor> trace;

  bool asks_for_anything() const {
    return options.skipped_phases != 0 || options.max_delay_ns != 0 || options.trace != nullptr;
  }
};

// A copy for one call.
Debug debug_of_call();

// Throws std::invalid_argument.
void set_debug(int64_t schedule, int64_t skipped_phases, std::optional<torch::stable::Tensor> trace,
               int64_t max_delay_ns, int64_t delay_seed);

// Counts one backward of one rank, which went this way. Safe on any thread.
void count_backward(weft_backward_source source);

// How many were counted since the process began, in the order of weft_backward_source: saved, workspace, recomputed.
std::tuple<int64_t, int64_t, int64_t> backward_sources();

}  // namespace weft_torch
