// e4m3 (OCP 8-bit floating point, "e4m3fn"): 1 sign, 4 exponent bits (bias 7), 3 mantissa bits. No infinity; 0x7f and
// 0xff are NaN; largest 448, smallest normal 2^-6, smallest subnormal 2^-9. Scales are the concern of block_scale.hpp.
#pragma once

#include <cstdint>

#include "core/annotations.hpp"
#include "numeric/bits.hpp"

namespace weft {

struct E4m3 {
  uint8_t bits;
};

inline constexpr float kE4m3Max = 448.0f;

WEFT_HD constexpr float to_float(E4m3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return bits_as<float>(sign | 0x7fc00000u);
  if (magnitude < 8u) {  // zero and the subnormals: mantissa * 2^-9
    return bits_as<float>(sign | bits_as<uint32_t>(static_cast<float>(magnitude) * 0x1p-9f));
  }
  return bits_as<float>(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
}

// Rounds to nearest even and saturates, bit for bit as cvt.rn.satfinite.e4m3x2.f32: past 448 and infinity become 448
// with their sign, NaN becomes 0x7f.
WEFT_HD constexpr E4m3 to_e4m3(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7f};
  if (magnitude >= bits_as<uint32_t>(kE4m3Max)) return {static_cast<uint8_t>(sign | 0x7eu)};
  if (magnitude < bits_as<uint32_t>(0x1p-6f)) {
    // The last place of fp32 at 2^14 is 2^-9, the step of the subnormals, so this addition does the rounding.
    const uint32_t rounded = bits_as<uint32_t>(bits_as<float>(magnitude) + 0x1p14f);
    return {static_cast<uint8_t>(sign | (rounded - bits_as<uint32_t>(0x1p14f)))};
  }
  magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);  // half of the last kept place, ties to even
  return {static_cast<uint8_t>(sign | ((magnitude - ((127u - 7u) << 23)) >> 20))};
}

}  // namespace weft
