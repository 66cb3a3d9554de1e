// The stream that a call runs in.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace weft_torch {

// torch's current stream of a CUDA device as a cudaStream_t; null for the CPU.
void* current_stream(const torch::stable::Device& device);

// The number of the graph capture that a stream is in; 0 for none, and for null.
uint64_t capture_of(void* stream);

}  // namespace weft_torch
