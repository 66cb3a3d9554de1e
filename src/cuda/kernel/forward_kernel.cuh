// The fused forward of one rank: one persistent kernel (stage/persistent.cuh is its role table).
//
//   task      operands                        epilogue                      waits for      raises
//   gate_up   rows of x, W_gate, W_up         SwiGLU, router weight; a', z  rows_ready*    mid_ready
//   down      a' pool, W_down                 o                             mid_ready      out_ready
//
// * of several ranks
#pragma once

#include "core/status.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/stage/forward_tasks.cuh"
#include "cuda/stage/persistent.cuh"

namespace weft {

template <int32_t kRanks, bool kSaveZ, class Probe>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ Together<ForwardParams, kRanks> launch) {
  const auto operands = [&] {
    const ForwardParams& own = own_params_anew(launch);
    return ProbedOperands<ForwardOperands, Probe>{{own}, Probe(own)};
  };
  const auto bodies = [&] {
    const ForwardParams& own = own_params_anew(launch);
    return ProbedBodies<ForwardBodies<kSaveZ>, Probe>{{own}, Probe(own)};
  };
  run_roles<kRanks == 1 ? 4 : 3, Probe>(launch, Direction::kForward, operands, bodies);
}

// Loads the kernels with a probe or without; returns how many of their CTAs the current device can hold at once.
template <class Probe>
int32_t load_forward_kernels() {
  return min_of(
      min_of(load_persistent(forward_kernel<1, false, Probe>), load_persistent(forward_kernel<1, true, Probe>)),
      min_of(load_persistent(forward_kernel<kMaxCudaRanks, false, Probe>),
             load_persistent(forward_kernel<kMaxCudaRanks, true, Probe>)));
}

template <class Probe>
void start_forward(std::span<const ForwardParams> ranks, bool save_z, int32_t num_sms, cudaStream_t stream) {
  with_together(ranks, [&]<int32_t kRanks>(const Together<ForwardParams, kRanks>& launch) {
    const auto kernel = save_z ? forward_kernel<kRanks, true, Probe> : forward_kernel<kRanks, false, Probe>;
    launch_persistent(kernel, launch, ranks.size(), num_sms, stream, "the forward kernel");
  });
}

}  // namespace weft
