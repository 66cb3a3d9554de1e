// The backward kernel that layers run.
#include "cuda/kernel/backward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {

int32_t load_backward() { return load_backward_kernels<NoProbe>(); }

void launch_backward(std::span<const BackwardParams> ranks, int32_t num_sms, cudaStream_t stream) {
  if (ranks[0].probe.probes()) return launch_probed_backward(ranks, num_sms, stream);
  start_backward<NoProbe>(ranks, num_sms, stream);
}

}  // namespace weft
