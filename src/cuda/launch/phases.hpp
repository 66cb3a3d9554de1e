// How a call launches its persistent kernel: once for all phases, or once a phase (WEFT_SCHEDULE_PHASED), pass after
// pass. Which passes there are only the device knows: a launch of one that is not needed ends at once.
#pragma once

#include <span>

#include "cuda/launch/persistent.hpp"

namespace weft {

static_assert(kAllPhases == WEFT_PHASE_ALL && kPullPhase == WEFT_PHASE_PULL && kCombinePhase == WEFT_PHASE_COMBINE &&
              matrix_phase(TaskKind::kGateUp) == WEFT_PHASE_GATE_UP &&
              matrix_phase(TaskKind::kDown) == WEFT_PHASE_DOWN &&
              matrix_phase(TaskKind::kDownDgrad) == WEFT_PHASE_DOWN_DGRAD &&
              matrix_phase(TaskKind::kGateUpDgrad) == WEFT_PHASE_GATE_UP_DGRAD &&
              matrix_phase(TaskKind::kDownWgrad) == WEFT_PHASE_DOWN_WGRAD &&
              matrix_phase(TaskKind::kGateUpWgrad) == WEFT_PHASE_GATE_UP_WGRAD);

struct PhaseOptions {
  bool one_by_one;
  PhaseMask skipped;  // phases whose results and flags are taken as if they were there
  ProbeParams probe;
};

// Loads the kernels below now, as load_forward does.
void load_phases();

// Makes the tickets of a pass begin anew.
void launch_reset_tickets(const PassFlags& flags, cudaStream_t stream);

// Raises the flags of a rank alone that the `skipped` phases would have raised.
void launch_raise_flags(const PersistentParams& params, Direction direction, PhaseMask skipped, cudaStream_t stream);

// launch(ranks) for each launch of the ranks of one call, whose options are the same.
template <class Params, class Launch>
void launch_phases(std::span<Params> ranks, const PhaseOptions& options, Direction direction, cudaStream_t stream,
                   const Launch& launch) {
  for (Params& params : ranks) {
    params.probe = options.probe;
    if (options.skipped != 0) launch_raise_flags(params, direction, options.skipped, stream);
  }
  const auto max_passes = static_cast<int32_t>(ranks[0].plan.shape.max_passes());
  for_each_launch(direction, options.one_by_one, options.skipped, max_passes, [&](const LaunchRange& range) {
    for (Params& params : ranks) {
      params.launch = range;
      if (options.one_by_one) launch_reset_tickets(params.flags.of_pass(range.first_pass), stream);
    }
    launch(std::span<const Params>(ranks));
  });
}

}  // namespace weft
