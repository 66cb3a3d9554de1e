// What a layer needs of the CUDA runtime: errors in words; memory, events and streams with an owner.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/status.hpp"

namespace weft {

inline void check_cuda(cudaError_t status, const char* what) {
  require(status != cudaErrorStreamCaptureUnsupported, WEFT_INVALID_ARGUMENT, what,
          ", since a CUDA graph is being captured: run the same call once before, with the same options; it makes what "
          "the layer keeps between calls");
  require(status == cudaSuccess, status == cudaErrorMemoryAllocation ? WEFT_OUT_OF_MEMORY : WEFT_INTERNAL, what, ": ",
          cudaGetErrorString(status));
}

struct DeviceDeleter {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct PinnedDeleter {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
struct EventDeleter {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, EventDeleter>;
struct StreamDeleter {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
using Stream = std::unique_ptr<CUstream_st, StreamDeleter>;

Event make_event();
// One that waits for no other: the default stream may hold a kernel that waits for this rank.
Stream make_stream();

// While it lives, what this thread does outside a captured stream is allowed beside the capture.
class OutsideCapture {
 public:
  OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Into device memory, in no stream of the caller's and no part of a capture, and by a copy: kernels that wait may leave
// no SM to another.
template <class Value>
void write_to_device(Value* target, const Value& value) {
  const OutsideCapture outside;
  const Stream stream = make_stream();
  const cudaError_t sent = cudaMemcpyAsync(target, &value, sizeof(Value), cudaMemcpyHostToDevice, stream.get());
  const cudaError_t done = cudaStreamSynchronize(stream.get());
  check_cuda(sent, "cannot write to the device");
  check_cuda(done, "cannot write to the device");
}

}  // namespace weft
