#include "api/backends.hpp"

#include "api/validate.hpp"
#include "core/status.hpp"
#if WEFT_HAS_CUDA
#include "cuda/launch/layer.hpp"
#include "symmetric/cuda_device.hpp"
#endif
#if WEFT_HAS_CPU
#include "reference/layer.hpp"
#endif

namespace weft {
namespace {

#if WEFT_HAS_CPU

void check_cpu(const weft_config&) {
#if defined(__AVX2__)
  require(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), WEFT_UNSUPPORTED,
          "this build needs a processor with AVX2 and FMA; rebuild with -DWEFT_CPU_ARCH= for this one");
#endif
}

std::unique_ptr<BackendLayer> make_cpu(const weft_config& config) {
  constexpr int32_t kDefaultMatrixWorkers = 2;
  ReferenceOptions options{};
  options.recipe = &recipe_of(config.precision);
  options.shape = shape_of(config);
  options.clamp_limit = config.clamp_limit;
  options.overlapped = config.schedule == WEFT_SCHEDULE_OVERLAPPED;
  options.num_matrix_workers = config.num_workers > 0 ? config.num_workers : kDefaultMatrixWorkers;
  options.deadline_s = deadline_or_default(config.deadline_s);
  return make_reference_layer(options);
}

#else

void check_cpu(const weft_config&) {
  throw Error(WEFT_UNSUPPORTED, "this build has no CPU backend; install Eigen 3.4 and build again");
}
std::unique_ptr<BackendLayer> make_cpu(const weft_config&) { return nullptr; }

#endif

#if WEFT_HAS_CUDA

CudaOptions cuda_options(const weft_config& config) {
  return {&recipe_of(config.precision),
          shape_of(config),
          config.clamp_limit,
          config.save,
          config.num_workers,
          deadline_or_default(config.deadline_s),
          config.schedule == WEFT_SCHEDULE_PHASED};
}
void check_cuda(const weft_config& config) {
  const std::string reason = cuda_unsupported(cuda_options(config));
  require(reason.empty(), WEFT_UNSUPPORTED, reason);
}
std::unique_ptr<BackendLayer> make_cuda(const weft_config& config) { return make_cuda_layer(cuda_options(config)); }
std::shared_ptr<Device> make_device() { return make_cuda_device(); }
std::function<void()> cuda_device_setter() { return current_cuda_device_setter(); }

#else

void check_cuda(const weft_config&) {
  throw Error(WEFT_UNSUPPORTED, "this build has no CUDA backend; use WEFT_BACKEND_CPU (device \"cpu\")");
}
std::unique_ptr<BackendLayer> make_cuda(const weft_config&) { return nullptr; }
std::shared_ptr<Device> make_device() { return nullptr; }
std::function<void()> cuda_device_setter() {
  return [] {};
}

#endif

}  // namespace

void check_backend(const weft_config& config) {
  return config.backend == WEFT_BACKEND_CPU ? check_cpu(config) : check_cuda(config);
}

std::unique_ptr<BackendLayer> make_backend_layer(const weft_config& config) {
  check_backend(config);
  return config.backend == WEFT_BACKEND_CPU ? make_cpu(config) : make_cuda(config);
}

std::unique_ptr<DeviceSymmetricMemory> make_device_memory(const std::shared_ptr<SymmetricMemory>& host) {
  return std::make_unique<DeviceSymmetricMemory>(host, make_device());
}

std::function<void()> current_device_setter() { return cuda_device_setter(); }

}  // namespace weft
