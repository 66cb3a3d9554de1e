// What a layer needs of the CUDA runtime: errors in words, memory and events with an owner, and the streams of ranks
// that share a process.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/status.hpp"
#include "layout/shape.hpp"

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

Event make_event();

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

// One that waits for no other: the default stream may hold a kernel that waits for this rank.
cudaStream_t make_stream();

// Into device memory, in no stream of the caller's and no part of a capture, and by a copy: kernels that wait may leave
// no SM to another.
template <class Value>
void write_to_device(Value* target, const Value& value) {
  const OutsideCapture outside;
  const cudaStream_t stream = make_stream();
  const cudaError_t sent = cudaMemcpyAsync(target, &value, sizeof(Value), cudaMemcpyHostToDevice, stream);
  const cudaError_t done = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check_cuda(sent, "cannot write to the device");
  check_cuda(done, "cannot write to the device");
}

// Where the kernels of a rank run that shares its process with others; on the current device. One a device and rank for
// all layers, and those of all ranks made one after another: streams share a few queues of the driver, in which kernels
// of two ranks must not be one behind the other.
cudaStream_t branch_stream(int device, const LayerShape& shape);

}  // namespace weft
