// SwiGLU of one element and its derivative, in the accumulation type. z = [g; u] comes rounded to the data dtype.
//   a = silu(g) u          dg = da u s (1 + g (1 - s))          du = da silu(g)          s = sigmoid(g)
// With a clamp limit L > 0: g <- min(g, L), u <- clamp(u, -L, L) first; a clamped element passes no gradient.
#pragma once

#include <cmath>

namespace weft {

template <class Real>
struct SwigluValue {
  Real g;  // after the clamp
  Real u;
  Real sigmoid;
  Real a;
  bool g_clamped;
  bool u_clamped;
};

template <class Real>
SwigluValue<Real> swiglu(Real g, Real u, Real clamp_limit) {
  SwigluValue<Real> value{g, u, 0, 0, false, false};
  if (clamp_limit > 0) {
    value.g_clamped = g > clamp_limit;
    value.u_clamped = u > clamp_limit || u < -clamp_limit;
    if (value.g_clamped) value.g = clamp_limit;
    if (value.u_clamped) value.u = u > 0 ? clamp_limit : -clamp_limit;
  }
  value.sigmoid = 1 / (1 + std::exp(-value.g));
  value.a = value.g * value.sigmoid * value.u;
  return value;
}

template <class Real>
struct SwigluGradient {
  Real dg;
  Real du;
};

template <class Real>
SwigluGradient<Real> swiglu_gradient(const SwigluValue<Real>& value, Real da) {
  const Real s = value.sigmoid;
  return {value.g_clamped ? Real{0} : da * value.u * s * (1 + value.g * (1 - s)),
          value.u_clamped ? Real{0} : da * value.g * s};
}

}  // namespace weft
