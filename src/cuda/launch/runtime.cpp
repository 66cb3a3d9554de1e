#include "cuda/launch/runtime.hpp"

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace weft {

Event make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cannot make a CUDA event");
  return Event(event);
}

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cannot make a CUDA stream");
  return stream;
}

cudaStream_t branch_stream(int device, const LayerShape& shape) {
  static std::mutex& mutex = *new std::mutex;  // never destroyed, as the driver may be gone when the process ends
  static auto& streams = *new std::map<int, std::vector<cudaStream_t>>;
  const std::lock_guard lock(mutex);
  std::vector<cudaStream_t>& of_device = streams[device];
  while (of_device.size() < static_cast<size_t>(shape.ep_size)) of_device.push_back(make_stream());
  return of_device[static_cast<size_t>(shape.ep_rank)];
}

}  // namespace weft
