// Device over the CUDA runtime: allocations of their own (an IPC handle exports all of one), mapped by IPC handles in
// other processes and by peer access from other devices of this one.
#include "symmetric/cuda_device.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "core/status.hpp"

namespace weft {
namespace {

void check(cudaError_t status, const char* what) {
  require(status == cudaSuccess, WEFT_INTERNAL, what, ": ", cudaGetErrorString(status));
}

// Tells processes apart; their ids alone would not, in containers that share memory, nor a random number after a fork.
uint64_t process_token() {
  static const uint64_t token = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return token ^ static_cast<uint64_t>(::getpid());
}

class CudaDevice final : public Device {
 public:
  CudaDevice() : ordinal_(current_cuda_device()) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, ordinal_), "cannot ask the CUDA device");
    static_assert(sizeof(properties.uuid) == sizeof(id_));
    std::memcpy(id_, &properties.uuid, sizeof(id_));
  }

  void describe(DeviceOffer& offer) const override {
    offer.process = process_token();
    offer.ordinal = ordinal_;
    std::memcpy(offer.device_id, id_, sizeof(id_));
  }

  void require_current() const override {
    const int current = current_cuda_device();
    require(current == ordinal_, WEFT_INVALID_ARGUMENT, "this group's layers are on device ", ordinal_,
            ", the current device is ", current, ": set the device to ", ordinal_,
            " (torch.cuda.set_device), or make another group");
  }

  std::byte* allocate(int64_t bytes) override {
    // In whole granules, so that the driver puts nothing else into what a handle exports.
    constexpr int64_t kGranule = int64_t{1} << 21;
    const auto size = static_cast<size_t>(align_up(max_of<int64_t>(bytes, 1), kGranule));
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, size);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // or the next launch would report it
      size_t free_bytes = 0;
      size_t total_bytes = 0;
      cudaMemGetInfo(&free_bytes, &total_bytes);
      throw Error(
          WEFT_OUT_OF_MEMORY,
          words("cannot allocate ", bytes, " bytes of symmetric memory on device ", ordinal_, ", of whose ",
                total_bytes, " bytes ", free_bytes,
                " are free; lower max_tokens, or empty caches (torch.cuda.empty_cache()) before the first call"));
    }
    check(status,
          "cannot allocate symmetric memory (a layer cannot be created while a stream is captured: make one "
          "call before)");
    try {
      // Not in the default stream, which waits for kernels that may wait for this rank.
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cannot make a CUDA stream");
      const cudaError_t cleared = cudaMemsetAsync(memory, 0, size, stream);
      const cudaError_t done = cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
      check(cleared, "cannot clear symmetric memory");
      check(done, "cannot clear symmetric memory");
    } catch (const Error&) {
      cudaFree(memory);
      throw;
    }
    return static_cast<std::byte*>(memory);
  }
  void free(std::byte* memory) noexcept override {
    const CurrentDevice current(ordinal_);
    cudaFree(memory);
  }

  void export_to(DeviceOffer::Area& area) override {
    const CurrentDevice current(ordinal_);
    cudaIpcMemHandle_t handle{};
    static_assert(sizeof(handle) == sizeof(area.handle));
    const cudaError_t status = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(area.address));
    require(status == cudaSuccess, WEFT_UNSUPPORTED, "cannot share memory of device ", ordinal_,
            " with other processes: ", cudaGetErrorString(status),
            "; the ranks of one process (virtual_ep_group) need no such handles");
    std::memcpy(area.handle, &handle, sizeof(handle));
  }
  std::byte* open(const DeviceOffer::Area& area, int32_t rank) override {
    const CurrentDevice current(ordinal_);
    cudaIpcMemHandle_t handle{};
    std::memcpy(&handle, area.handle, sizeof(handle));
    void* memory = nullptr;
    const cudaError_t status = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
    require(status == cudaSuccess, WEFT_UNSUPPORTED, "device ", ordinal_, " cannot map the memory of rank ", rank, ": ",
            cudaGetErrorString(status),
            "; all ranks must be on GPUs that reach one another (nvidia-smi topo -p2p r), and containers must share "
            "the IPC namespace (--ipc=host)");
    return static_cast<std::byte*>(memory);
  }
  void close(std::byte* memory) noexcept override {
    const CurrentDevice current(ordinal_);
    cudaIpcCloseMemHandle(memory);
  }
  void reach(int32_t ordinal, int32_t rank) override {
    const CurrentDevice current(ordinal_);
    int can_reach = 0;
    check(cudaDeviceCanAccessPeer(&can_reach, ordinal_, ordinal), "cannot ask for peer access");
    require(can_reach != 0, WEFT_UNSUPPORTED, "device ", ordinal_, " cannot access device ", ordinal, " of rank ", rank,
            "; choose GPUs that reach one another (nvidia-smi topo -p2p r)");
    const cudaError_t status = cudaDeviceEnablePeerAccess(ordinal, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
      return;
    }
    require(status == cudaSuccess, WEFT_UNSUPPORTED, "device ", ordinal_, " cannot enable access to device ", ordinal,
            " of rank ", rank, ": ", cudaGetErrorString(status));
  }

  void synchronize() override {
    const CurrentDevice current(ordinal_);
    check(cudaDeviceSynchronize(), "the CUDA device has failed");
  }

 private:
  int ordinal_;
  unsigned char id_[sizeof(DeviceOffer::device_id)];
};

}  // namespace

int current_cuda_device() {
  int ordinal = 0;
  const cudaError_t status = cudaGetDevice(&ordinal);
  require(status == cudaSuccess, WEFT_UNSUPPORTED, "no CUDA device: ", cudaGetErrorString(status),
          "; use device \"cpu\"");
  return ordinal;
}

CurrentDevice::CurrentDevice(int ordinal) {
  cudaGetDevice(&before_);
  if (before_ != ordinal) cudaSetDevice(ordinal);
}
CurrentDevice::~CurrentDevice() {
  int now = 0;
  if (cudaGetDevice(&now) == cudaSuccess && now != before_) cudaSetDevice(before_);
}

std::function<void()> current_cuda_device_setter() {
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess) ordinal = 0;
  return [ordinal] {
    if (ordinal != 0) cudaSetDevice(ordinal);
  };
}

std::shared_ptr<Device> make_cuda_device() { return std::make_shared<CudaDevice>(); }

}  // namespace weft
