// The backward kernel that layers run.
#include "cuda/kernel/backward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {

int32_t load_backward() { return load_persistent(backward_kernel<NoProbe>); }

void launch_backward(const BackwardParams& params, int32_t num_sms, cudaStream_t stream) {
  if (params.probe.probes()) return launch_probed_backward(params, num_sms, stream);
  start_backward<NoProbe>(params, num_sms, stream);
}

}  // namespace weft
