// The kernels with a probe, which launch_forward and launch_backward start where parameters ask for one.
#pragma once

#include "cuda/launch/backward.hpp"
#include "cuda/launch/forward.hpp"

namespace weft {

// Loads the kernels now, as load_forward does.
void load_probed_forward();
void load_probed_backward();

void launch_probed_forward(std::span<const ForwardParams> ranks, bool save_z, int32_t num_sms, cudaStream_t stream);
void launch_probed_backward(std::span<const BackwardParams> ranks, int32_t num_sms, cudaStream_t stream);

}  // namespace weft
