// The fused forward of one rank: one persistent kernel (stage/persistent.cuh is its role table).
//
//   task      operands                        epilogue                      waits for      raises
//   gate_up   x pool, W_gate and W_up         SwiGLU, router weight; a', z  rows_ready     mid_ready
//   down      a' pool, W_down                 o                             mid_ready      out_ready
#include "cuda/launch/forward.hpp"

#include <limits>

#include "core/status.hpp"
#include "cuda/stage/forward_tasks.cuh"
#include "cuda/stage/persistent.cuh"

namespace weft {
namespace {

template <bool kSaveZ>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  run_roles(params, ForwardOperands{params}, ForwardBodies<kSaveZ>{params}, Direction::kForward, params.combine);
}

__global__ void stage_tokens_kernel(int64_t* target, int64_t num_tokens) { *target = num_tokens; }

}  // namespace

void launch_stage_tokens(int64_t* target, int64_t num_tokens, cudaStream_t stream) {
  stage_tokens_kernel<<<1, 1, 0, stream>>>(target, num_tokens);
  const cudaError_t status = cudaGetLastError();
  require(status == cudaSuccess, WEFT_INTERNAL, "the staging kernel did not start: ", cudaGetErrorString(status));
}

int32_t load_forward() {
  int32_t fewest = std::numeric_limits<int32_t>::max();
  for (const auto kernel : {forward_kernel<false>, forward_kernel<true>}) {
    int32_t num_ctas = 0;
    const cudaError_t status = load_persistent(kernel, num_ctas);
    require(status == cudaSuccess, WEFT_INTERNAL, "cannot load the forward kernel: ", cudaGetErrorString(status));
    fewest = min_of(fewest, num_ctas);
  }
  return fewest;
}

void launch_forward(const ForwardParams& params, bool save_z, int32_t num_sms, cudaStream_t stream) {
  const cudaError_t status =
      launch_persistent(save_z ? forward_kernel<true> : forward_kernel<false>, params, num_sms, stream);
  require(status == cudaSuccess, WEFT_INTERNAL, "the forward kernel did not start: ", cudaGetErrorString(status));
}

}  // namespace weft
