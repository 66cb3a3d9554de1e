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

// Asked of the driver, whose library has one name on every machine.
uint64_t capture_of(void* stream) {
  if (stream == nullptr) return 0;  // the legacy stream cannot be captured
  using Function = int32_t (*)(void* stream, int32_t* status, uint64_t* id, void*, void*, void*);
  static const auto function = [] {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, "cuStreamGetCaptureInfo_v2"));
  }();
  require(function != nullptr, "the CUDA driver does not tell whether a stream is captured: a newer driver is needed");
  constexpr int32_t kCaptureActive = 1;
  int32_t status = 0;
  uint64_t id = 0;
  const bool told = function(stream, &status, &id, nullptr, nullptr, nullptr) == 0;
  return told && status == kCaptureActive ? id + 1 : 0;
}

}  // namespace weft_torch
