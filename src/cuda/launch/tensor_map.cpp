#include "cuda/launch/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "core/status.hpp"

namespace weft {
namespace {

constexpr cuuint32_t kBoxBytes = 128;  // innermost: a row of the swizzle

// The driver's own function, reached through the runtime so that nothing links against the driver.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
    require(status == cudaSuccess && found == cudaDriverEntryPointSuccess, WEFT_UNSUPPORTED,
            "the NVIDIA driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12 or newer");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  return function;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorView& view, const char* name) {
  require(reinterpret_cast<uintptr_t>(view.base) % 16 == 0, WEFT_INVALID_ARGUMENT, name,
          " must be aligned to 16 bytes; its address ends in ", reinterpret_cast<uintptr_t>(view.base) % 16);
  const bool is_fp32 = view.dtype == WEFT_DTYPE_FP32;
  const cuuint32_t element_bytes = is_fp32 ? 4 : 2;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(view.size[0]), static_cast<cuuint64_t>(view.size[1]),
                               static_cast<cuuint64_t>(view.size[2])};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(view.stride[0]) * element_bytes,
                                 static_cast<cuuint64_t>(view.stride[1]) * element_bytes};
  const cuuint32_t box[3] = {kBoxBytes / element_bytes, static_cast<cuuint32_t>(view.box[0]),
                             static_cast<cuuint32_t>(view.box[1])};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode_function()(
      &map, is_fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<void*>(view.base), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, WEFT_INTERNAL, "the driver refuses a tensor map of ", name, " (error ",
          static_cast<int>(status), ")");
  return map;
}

}  // namespace weft
