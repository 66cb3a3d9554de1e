// Quantisation of a group of elements that share one scale: what every backend must reproduce bit for bit. A group is a
// view: 1x128 of a row, 128x128 of a weight, 1x32 for MX, and, with swapped strides, the same of a transposed matrix.
//
//   amax    = largest |x| of the group; NaN elements do not count
//   fp8:  inverse = 448 / amax         one IEEE fp32 division (nvcc's default, -prec-div=true)
//         scale   = amax * (1 / 448)   the constant rounded to fp32
//   mxfp8: scale  = e8m0_round_up(amax, 448), inverse = 1 / scale, both powers of two
//   code    = to_e4m3(x * inverse)     one fp32 product, then one rounding
//
// An element is worth to_float(code) * scale. An all-zero group has scale 1. A NaN element becomes NaN and leaves the
// others as they are; an infinite element makes the whole group NaN (0 * infinity, or a NaN scale).
#pragma once

#include <cstdint>

#include "core/annotations.hpp"
#include "core/span2d.hpp"
#include "numeric/bf16.hpp"
#include "numeric/convert.hpp"
#include "numeric/e4m3.hpp"
#include "numeric/e8m0.hpp"

namespace weft {

inline constexpr int64_t kFp8Group = 128;  // both sides of a weight block, and the length of a row's group
inline constexpr int64_t kMxGroup = 32;

template <class Scale>
struct GroupScale {
  Scale scale;
  float inverse;
};

// Groups below 448 * 2^-126 take its scale: 448 / amax would overflow below 448 / FLT_MAX, and a zero in such a group
// become 0 * infinity. Both factors are normal numbers, so flushing subnormals to zero changes neither.
WEFT_HD constexpr GroupScale<float> fp8_scale(float amax) {
  if (amax == 0) return {1, 1};
  constexpr float kSmallestAmax = kE4m3Max * 0x1p-126f;
  const float bounded = amax < kSmallestAmax ? kSmallestAmax : amax;
  return {bounded * (1 / kE4m3Max), kE4m3Max / bounded};
}

WEFT_HD constexpr GroupScale<E8m0> mx_scale(float amax) {
  const E8m0 scale = amax == 0 ? kE8m0One : e8m0_round_up(amax, kE4m3Max);
  return {scale, to_float(reciprocal(scale))};
}

// The largest magnitude of a group of Bf16 or float. The comparison is false for NaN, as fmaxf ignores it.
template <class In>
WEFT_HD float amax_of(Span2d<In> x) {
  float amax = 0;
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t col = 0; col < x.cols; ++col) {
      const float value = convert<float>(x.at(row, col));
      const float magnitude = value < 0 ? -value : value;
      if (magnitude > amax) amax = magnitude;
    }
  }
  return amax;
}

// Writes the codes of a group as Out: E4m3, or float for arithmetic on their values (before the scale). x and codes may
// be the same memory if they are the same type.
template <class In, class Out>
WEFT_HD void encode_group(Span2d<In> x, float inverse, Span2d<Out> codes) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t col = 0; col < x.cols; ++col) {
      codes.at(row, col) = convert<Out>(to_e4m3(convert<float>(x.at(row, col)) * inverse));
    }
  }
}

// Each returns the scale of the group.
template <class In, class Out>
WEFT_HD float quantize_fp8(Span2d<In> x, Span2d<Out> codes) {
  const GroupScale<float> group = fp8_scale(amax_of(x));
  encode_group(x, group.inverse, codes);
  return group.scale;
}

template <class In, class Out>
WEFT_HD E8m0 quantize_mx(Span2d<In> x, Span2d<Out> codes) {
  const GroupScale<E8m0> group = mx_scale(amax_of(x));
  encode_group(x, group.inverse, codes);
  return group.scale;
}

}  // namespace weft
