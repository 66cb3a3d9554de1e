// Integer helpers used by layout and schedule on host and device.
#pragma once

#include <cstdint>

#include "core/annotations.hpp"

namespace weft {

template <class Int>
WEFT_HD constexpr Int ceil_div(Int numerator, Int denominator) {
  return (numerator + denominator - 1) / denominator;
}

template <class Int>
WEFT_HD constexpr Int align_up(Int value, Int alignment) {
  return ceil_div(value, alignment) * alignment;
}

template <class T>
WEFT_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <class T>
WEFT_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

}  // namespace weft
