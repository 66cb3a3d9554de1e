#include "cuda/launch/runtime.hpp"

namespace weft {

Event make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cannot make a CUDA event");
  return Event(event);
}

Stream make_stream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cannot make a CUDA stream");
  return Stream(stream);
}

}  // namespace weft
