// convert<To>(x): one spelling for code that is a template over its number type. Rounds at most once.
#pragma once

#include <type_traits>

#include "core/annotations.hpp"
#include "numeric/bf16.hpp"
#include "numeric/e4m3.hpp"

namespace weft {

// From a storage format (Bf16, E4m3) to float or double: exact. From float or double to Bf16 or each other: to nearest
// even. To E4m3 only from E4m3: a saturating cast is asked for by name.
template <class To, class From>
WEFT_HD constexpr To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, Bf16>) {
    return to_bf16(x);
  } else if constexpr (std::is_class_v<From>) {
    return static_cast<To>(to_float(x));
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace weft
