// Tensor maps: how TMA sees a tensor in global memory. Made on the host, handed to kernels by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "weft/weft.h"

namespace weft {

// A 3-d view: `size` elements in each dimension, the innermost dense, the others `stride` elements apart; and the box
// of it that one instruction moves, 128 bytes of innermost elements wide and swizzled in shared memory.
struct TensorView {
  const void* base;
  int64_t size[3];
  int64_t stride[2];
  int32_t box[2];                      // of the two outer dimensions
  weft_dtype dtype = WEFT_DTYPE_BF16;  // or fp32
};

// Throws Error(WEFT_INVALID_ARGUMENT) if the base is not 16-byte aligned, Error(WEFT_INTERNAL) if the driver refuses.
CUtensorMap make_tensor_map(const TensorView& view, const char* name);

}  // namespace weft
