// Carver: lays arrays out in one buffer. Run without a base it only measures; run with one it yields the pointers.
// Sizes on the host and addresses on host or device come from the same calls, so they cannot drift apart.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.hpp"
#include "core/math.hpp"

namespace weft {

// Every array starts on this boundary: enough for vector loads, bulk copies and tensor-map bases.
inline constexpr int64_t kArrayAlignment = 256;

class Carver {
 public:
  WEFT_HD explicit Carver(void* base = nullptr) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  WEFT_HD T* take(int64_t count) {
    const int64_t begin = align_up(used_, kArrayAlignment);
    used_ = begin + count * static_cast<int64_t>(sizeof(T));
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }

  // Bytes from the base to the end of the last array.
  WEFT_HD int64_t used() const { return align_up(used_, kArrayAlignment); }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace weft
