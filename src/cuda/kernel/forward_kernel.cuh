// The fused forward of one rank: one persistent kernel (stage/persistent.cuh is its role table).
//
//   task      operands                        epilogue                      waits for      raises
//   gate_up   x pool, W_gate and W_up         SwiGLU, router weight; a', z  rows_ready     mid_ready
//   down      a' pool, W_down                 o                             mid_ready      out_ready
#pragma once

#include "core/status.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/stage/forward_tasks.cuh"
#include "cuda/stage/persistent.cuh"

namespace weft {

template <bool kSaveZ, class Probe>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  const Probe probe(params);
  run_roles<3>(params, ProbedOperands<ForwardOperands, Probe>{{params}, probe},
               ProbedBodies<ForwardBodies<kSaveZ>, Probe>{{params}, probe}, Direction::kForward, params.combine, probe);
}

template <class Probe>
void start_forward(const ForwardParams& params, bool save_z, int32_t num_sms, cudaStream_t stream) {
  const cudaError_t status =
      launch_persistent(save_z ? forward_kernel<true, Probe> : forward_kernel<false, Probe>, params, num_sms, stream);
  require(status == cudaSuccess, WEFT_INTERNAL, "the forward kernel did not start: ", cudaGetErrorString(status));
}

}  // namespace weft
