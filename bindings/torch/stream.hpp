// The stream that a call runs in.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace weft_torch {

// torch's current stream of a CUDA device as a cudaStream_t; null for the CPU.
void* current_stream(const torch::stable::Device& device);

}  // namespace weft_torch
