// The backward kernel with a probe, for tools and tests.
#include "cuda/kernel/backward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {

void load_probed_backward() { load_persistent(backward_kernel<Probe>); }

void launch_probed_backward(const BackwardParams& params, int32_t num_sms, cudaStream_t stream) {
  start_backward<Probe>(params, num_sms, stream);
}

}  // namespace weft
