// The forward kernel with a probe, for tools and tests.
#include "cuda/kernel/forward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {

void load_probed_forward() { load_forward_kernels<Probe>(); }

void launch_probed_forward(std::span<const ForwardParams> ranks, bool save_z, int32_t num_sms, cudaStream_t stream) {
  start_forward<Probe>(ranks, save_z, num_sms, stream);
}

}  // namespace weft
