// The fused backward of one rank: one persistent kernel (stage/persistent.cuh is its role table).
//
//   task            operands                    epilogue                                       waits for    raises
//   gate_up         x pool, W_gate and W_up     z, where dz will be                            rows_ready   z_ready
//   down_dgrad      dy pool, W_down             SwiGLU', router weight; dz, a', parts of dw    rows_ready   mid_ready
//   gate_up_dgrad   dz pool, W_gate and W_up    dx rows                                        mid_ready    out_ready
//   down_wgrad      dy pool, a' pool            dW_down                                        mid_ready    -
//   gate_up_wgrad   dz pool, x pool             dW_gate, dW_up                                 mid_ready    -
//
// z of a down_dgrad tile comes through the ring of stages behind the tile's last step, and dz goes out from there.
// There are gate_up tasks only where z has to be made again - nothing was saved, or there are several passes, of which
// a forward leaves one - and down_dgrad then waits for z_ready. What is made lies in the pool of dz: each tile of z is
// read once, by the task that puts dz in its place.
#pragma once

#include "core/status.hpp"
#include "cuda/launch/backward.hpp"
#include "cuda/stage/backward_tasks.cuh"
#include "cuda/stage/persistent.cuh"

namespace weft {

template <class Probe>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams params) {
  const Probe probe(params);
  run_roles<2>(params, ProbedOperands<BackwardOperands, Probe>{{params, *params.plan.num_passes == 1}, probe},
               ProbedBodies<BackwardBodies, Probe>{{params}, probe}, Direction::kBackward, params.combine, probe);
}

template <class Probe>
void start_backward(const BackwardParams& params, int32_t num_sms, cudaStream_t stream) {
  const cudaError_t status = launch_persistent(backward_kernel<Probe>, params, num_sms, stream);
  require(status == cudaSuccess, WEFT_INTERNAL, "the backward kernel did not start: ", cudaGetErrorString(status));
}

}  // namespace weft
