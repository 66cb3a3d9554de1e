// The fused backward of one rank: one persistent kernel (stage/persistent.cuh is its role table).
//
//   task            operands                    epilogue                                       waits for    raises
//   gate_up         rows of x, W_gate, W_up     z, where dz will be                            rows_ready*  z_ready
//   down_dgrad      rows of dy, W_down          SwiGLU', router weight; dz, a', parts of dw    rows_ready*  mid_ready
//   gate_up_dgrad   dz pool, W_gate and W_up    dx rows                                        mid_ready    out_ready
//   down_wgrad      rows of dy, a' pool         dW_down                                        mid_ready    -
//   gate_up_wgrad   rows of x, dz pool          dW_gate, dW_up                                 mid_ready    -
//
// z of a down_dgrad tile comes through the ring of stages behind the tile's last step, and dz goes out from there.
// There are gate_up tasks only where z has to be made again - nothing was saved, or there are several passes, of which
// a forward leaves one - and down_dgrad then waits for z_ready. What is made lies in the pool of dz: each tile of z is
// read once, by the task that puts dz in its place.
// * of several ranks
#pragma once

#include "core/status.hpp"
#include "cuda/launch/backward.hpp"
#include "cuda/stage/backward_tasks.cuh"
#include "cuda/stage/persistent.cuh"

namespace weft {

template <int32_t kRanks, class Probe>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ Together<BackwardParams, kRanks> launch) {
  const auto operands = [&] {
    const BackwardParams& own = own_params_anew(launch);
    return ProbedOperands<BackwardOperands, Probe>{{own, *own.plan.num_passes == 1}, Probe(own)};
  };
  const auto bodies = [&] {
    const BackwardParams& own = own_params_anew(launch);
    return ProbedBodies<BackwardBodies<kRanks>, Probe>{{launch, own}, Probe(own)};
  };
  run_roles<3, Probe>(launch, Direction::kBackward, operands, bodies);
}

// As load_forward_kernels.
template <class Probe>
int32_t load_backward_kernels() {
  return min_of(load_persistent(backward_kernel<1, Probe>), load_persistent(backward_kernel<kMaxCudaRanks, Probe>));
}

template <class Probe>
void start_backward(std::span<const BackwardParams> ranks, int32_t num_sms, cudaStream_t stream) {
  with_together(ranks, [&]<int32_t kRanks>(const Together<BackwardParams, kRanks>& launch) {
    launch_persistent(backward_kernel<kRanks, Probe>, launch, ranks.size(), num_sms, stream, "the backward kernel");
  });
}

}  // namespace weft
