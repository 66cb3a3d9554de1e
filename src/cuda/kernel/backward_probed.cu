// The backward kernel with a probe, for tools and tests.
#include "cuda/kernel/backward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {

void load_probed_backward() { load_backward_kernels<Probe>(); }

void launch_probed_backward(std::span<const BackwardParams> ranks, int32_t num_sms, cudaStream_t stream) {
  start_backward<Probe>(ranks, num_sms, stream);
}

}  // namespace weft
