// bf16: the upper half of an fp32 (1 sign, 8 exponent, 7 mantissa bits). Storage and conversions only: arithmetic is
// for whoever decodes to fp32. Every conversion rounds once, to nearest even, as cvt.rn.bf16.f32 does: infinity stays,
// finite values past the largest become infinity, any NaN becomes the canonical 0x7fff.
#pragma once

#include <cstdint>

#include "core/annotations.hpp"
#include "numeric/bits.hpp"

namespace weft {

struct Bf16 {
  uint16_t bits;
};

WEFT_HD constexpr float to_float(Bf16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

WEFT_HD constexpr Bf16 to_bf16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  // Adds just under half of the last kept place, plus one if that place is odd: a tie then carries only to even.
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Not to_bf16(float(x)): a double just past the middle of two bf16 values can round to the middle in fp32 and then away
// from the nearest bf16. Rounding to odd on the way (truncate, and set the last bit if anything was cut) prevents that:
// the odd bit keeps the value off the middle.
WEFT_HD constexpr Bf16 to_bf16(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  uint32_t bits = bits_as<uint32_t>(nearest);
  if (back != x) {
    const bool rounded_away = x < 0 ? back < x : back > x;
    bits = (bits - (rounded_away ? 1u : 0u)) | 1u;
  }
  return to_bf16(bits_as<float>(bits));
}

}  // namespace weft
