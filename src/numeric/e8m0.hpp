// e8m0: the scale of a block in the OCP Microscaling Formats (MX) specification 1.0: the power of two 2^(bits - 127),
// without sign or mantissa. 0xff is NaN; zero does not exist. block_scale.hpp says which elements share one.
#pragma once

#include <cstdint>

#include "core/annotations.hpp"
#include "numeric/bits.hpp"

namespace weft {

struct E8m0 {
  uint8_t bits;
};

inline constexpr E8m0 kE8m0One{127};

WEFT_HD constexpr float to_float(E8m0 x) {
  if (x.bits == 0xffu) return bits_as<float>(0x7fc00000u);
  if (x.bits == 0u) return 0x1p-127f;  // subnormal in fp32: its exponent field cannot express it
  return bits_as<float>(static_cast<uint32_t>(x.bits) << 23);
}

// 1 / x, exact: the mirror image about 2^0. NaN stays NaN.
WEFT_HD constexpr E8m0 reciprocal(E8m0 x) { return x.bits == 0xffu ? x : E8m0{static_cast<uint8_t>(254u - x.bits)}; }

// The smallest scale with amax / scale <= largest: the quotient's exponent rounded up, not down as the specification
// proposes, so that no element saturates ("Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027, reports that
// training can diverge otherwise). amax >= 0; infinity or NaN give NaN. largest: a normal number of at least 2.
WEFT_HD constexpr E8m0 e8m0_round_up(float amax, float largest) {
  const int32_t amax_bits = bits_as<int32_t>(amax);
  if (amax_bits >= 0x7f800000) return {0xff};
  // fp32 bits order like the values and one exponent step is 2^23 of them, so this is ceil(log2(amax / largest)) with
  // no rounding. A subnormal amax has no such step, but lies below the smallest scale times 2 and ends there anyway.
  const int32_t exponent = (amax_bits - bits_as<int32_t>(largest) + 0x7fffff) >> 23;
  const int32_t biased = exponent + 127;
  return {static_cast<uint8_t>(biased < 0 ? 0 : biased)};
}

}  // namespace weft
