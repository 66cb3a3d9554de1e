// CUDA devices, for those who need no more of CUDA than which one is current. Only in builds with CUDA.
#pragma once

#include <functional>
#include <memory>

#include "symmetric/device_memory.hpp"

namespace weft {

// The calling thread's current device, by its ordinal. Throws Error(WEFT_UNSUPPORTED) if there is none.
int current_cuda_device();

// Makes a device current in this thread, and what was current before when it goes.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// Gives another thread, which starts with device 0, the calling thread's current device. Touches no device when that is
// 0, or there is none.
std::function<void()> current_cuda_device_setter();

// The current device.
std::shared_ptr<Device> make_cuda_device();

}  // namespace weft
