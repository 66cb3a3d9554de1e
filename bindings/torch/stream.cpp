#include "stream.hpp"

#include <dlfcn.h>

#include <cstdint>

#include "errors.hpp"

namespace weft_torch {

// The function lives in torch's CUDA library, which this module, made for machines without it too, does not link:
// whoever has a CUDA tensor has loaded it.
void* current_stream(const torch::stable::Device& device) {
  if (device.type() == torch::headeronly::DeviceType::CPU) return nullptr;
  using Function = int32_t (*)(int32_t device_index, void** stream);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  require(function != nullptr, "this torch has no CUDA: its libtorch_cuda.so is not loaded");
  void* stream = nullptr;
  require(function(device.index(), &stream) == 0, "torch does not tell its current stream");
  return stream;
}

}  // namespace weft_torch
