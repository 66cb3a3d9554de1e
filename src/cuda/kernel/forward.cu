// The forward kernel that layers run, and the small one that tells a plan how many tokens there are.
#include "cuda/kernel/forward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {
namespace {

__global__ void stage_tokens_kernel(int64_t* target, int64_t num_tokens) { *target = num_tokens; }

}  // namespace

void launch_stage_tokens(int64_t* target, int64_t num_tokens, cudaStream_t stream) {
  stage_tokens_kernel<<<1, 1, 0, stream>>>(target, num_tokens);
  const cudaError_t status = cudaGetLastError();
  require(status == cudaSuccess, WEFT_INTERNAL, "the staging kernel did not start: ", cudaGetErrorString(status));
}

int32_t load_forward() { return load_forward_kernels<NoProbe>(); }

void launch_forward(std::span<const ForwardParams> ranks, bool save_z, int32_t num_sms, cudaStream_t stream) {
  if (ranks[0].probe.probes()) return launch_probed_forward(ranks, save_z, num_sms, stream);
  start_forward<NoProbe>(ranks, save_z, num_sms, stream);
}

}  // namespace weft
