// Reinterprets the bits of a value as another type of the same size, on host and device and in constant expressions.
// The builtin rather than std::bit_cast: nvcc calls std's only under --expt-relaxed-constexpr.
#pragma once

#include <type_traits>

#include "core/annotations.hpp"

namespace weft {

template <class To, class From>
WEFT_HD constexpr To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  static_assert(std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>);
  return __builtin_bit_cast(To, value);
}

}  // namespace weft
