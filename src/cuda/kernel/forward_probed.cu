// The forward kernel with a probe, for tools and tests.
#include "cuda/kernel/forward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {

void load_probed_forward() {
  load_persistent(forward_kernel<false, Probe>);
  load_persistent(forward_kernel<true, Probe>);
}

void launch_probed_forward(const ForwardParams& params, bool save_z, int32_t num_sms, cudaStream_t stream) {
  start_forward<Probe>(params, save_z, num_sms, stream);
}

}  // namespace weft
