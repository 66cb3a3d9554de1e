// The one list of precisions: names, data dtype, what shapes they allow, and what each GEMM rounds its operands to.
// A further precision is a further line of kRecipes. Which backend can run one is for the backends to say.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/annotations.hpp"
#include "core/status.hpp"
#include "weft/weft.h"

namespace weft {

// How a GEMM reads an operand whose stored form is the data dtype. "Along the contraction" is the GEMM's K.
enum class OperandFormat : uint8_t {
  kExact,         // as it is: fp32 or fp64
  kBf16,          // bf16
  kE4m3Row128,    // e4m3, one fp32 scale per 1x128 along the contraction
  kE4m3Block128,  // e4m3, one fp32 scale per 128x128
  kMxE4m3,        // e4m3, one e8m0 scale per 1x32 along the contraction
};

// Forward: gate_up (z) and down (o). Dgrad: u' and dx. Wgrad: ddown and dgate_up.
enum class GemmKind : uint8_t { kForward, kDgrad, kWgrad };

struct GemmFormats {
  OperandFormat activation;  // routed rows: x, a' forward; dy, dz dgrad and wgrad
  OperandFormat other;       // the weights forward and dgrad; the rows a', x in wgrad
};

struct Recipe {
  weft_precision precision;
  const char* name;  // as in configuration files
  weft_dtype data_dtype;
  int32_t hidden_multiple;        // hidden must be a multiple of it
  int32_t intermediate_multiple;  // likewise
  bool cpu_only;
  GemmFormats forward;
  GemmFormats dgrad;
  GemmFormats wgrad;

  WEFT_HD constexpr GemmFormats formats(GemmKind kind) const {
    return kind == GemmKind::kForward ? forward : kind == GemmKind::kDgrad ? dgrad : wgrad;
  }
};

inline constexpr GemmFormats kExactGemm{OperandFormat::kExact, OperandFormat::kExact};
inline constexpr GemmFormats kBf16Gemm{OperandFormat::kBf16, OperandFormat::kBf16};
inline constexpr GemmFormats kFp8Gemm{OperandFormat::kE4m3Row128, OperandFormat::kE4m3Block128};
inline constexpr GemmFormats kMxfp8Gemm{OperandFormat::kMxE4m3, OperandFormat::kMxE4m3};

// Multiples: fp8 needs whole groups of 128; mxfp8 has groups of 32, but tiles, like those of bf16, are 64 deep.
// Wgrad stays bf16 under fp8 and mxfp8: quantising its operands too adds to the error of the weight gradients.
inline constexpr Recipe kRecipes[] = {
    {WEFT_PRECISION_FP64, "fp64", WEFT_DTYPE_FP64, 1, 1, true, kExactGemm, kExactGemm, kExactGemm},
    {WEFT_PRECISION_FP32, "fp32", WEFT_DTYPE_FP32, 1, 1, true, kExactGemm, kExactGemm, kExactGemm},
    {WEFT_PRECISION_BF16, "bf16", WEFT_DTYPE_BF16, 64, 64, false, kBf16Gemm, kBf16Gemm, kBf16Gemm},
    {WEFT_PRECISION_FP8, "fp8", WEFT_DTYPE_BF16, 128, 128, false, kFp8Gemm, kFp8Gemm, kBf16Gemm},
    {WEFT_PRECISION_FP8_BWD, "fp8_bwd", WEFT_DTYPE_BF16, 128, 128, false, kBf16Gemm, kFp8Gemm, kBf16Gemm},
    {WEFT_PRECISION_MXFP8, "mxfp8", WEFT_DTYPE_BF16, 64, 64, false, kMxfp8Gemm, kMxfp8Gemm, kBf16Gemm},
};

// Every allowed name, for the words of errors: "fp64", "fp32", ...
inline std::string precision_names() {
  std::string names;
  for (const Recipe& recipe : kRecipes) {
    names += names.empty() ? "\"" : ", \"";
    names += recipe.name;
    names += '"';
  }
  return names;
}

constexpr const Recipe& recipe_of(weft_precision precision) {
  for (const Recipe& recipe : kRecipes) {
    if (recipe.precision == precision) return recipe;
  }
  throw Error(WEFT_INVALID_ARGUMENT, words("precision ", static_cast<int>(precision),
                                           " is not a weft_precision; allowed: ", precision_names()));
}

// The recipe as a constant, for kernels, which choose at compile time: kRecipeOf<P>.forward.activation.
template <weft_precision kPrecision>
inline constexpr Recipe kRecipeOf = recipe_of(kPrecision);

inline const Recipe& recipe_of(std::string_view name) {
  for (const Recipe& recipe : kRecipes) {
    if (name == recipe.name) return recipe;
  }
  throw Error(WEFT_INVALID_ARGUMENT, words("precision \"", name, "\" is unknown; allowed: ", precision_names()));
}

WEFT_HD constexpr int64_t dtype_bytes(weft_dtype dtype) {
  return dtype == WEFT_DTYPE_FP64 ? 8 : dtype == WEFT_DTYPE_FP32 ? 4 : 2;
}

}  // namespace weft
