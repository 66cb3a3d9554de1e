// Number formats against independent oracles in double: exhaustive over codes, dense over inputs, and the properties
// that quantised groups and the list of precisions must have.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "numeric/bf16.hpp"
#include "numeric/block_scale.hpp"
#include "numeric/convert.hpp"
#include "numeric/e4m3.hpp"
#include "numeric/e8m0.hpp"
#include "numeric/recipe.hpp"

namespace weft {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Every exponent and sign with the upper mantissa bits exhaustive, and lower halves on, just beside and far from the
// middle of two bf16 or e4m3 values.
template <class Visit>
void for_dense_floats(Visit visit) {
  for (uint32_t upper = 0; upper < 0x10000 && !testing::Test::HasFatalFailure(); ++upper) {
    for (uint32_t lower : {0x0000u, 0x0001u, 0x5a5au, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      visit(std::bit_cast<float>(upper << 16 | lower));
    }
  }
}

// The nearest bf16 by rescaling to an integer and rounding that to nearest even.
double nearest_bf16(double x) {
  if (x == 0 || std::isinf(x)) return x;
  const int exponent = std::max(std::ilogb(x), -126);
  const double value = std::ldexp(std::nearbyint(std::ldexp(x, 7 - exponent)), exponent - 7);
  return std::abs(value) >= std::ldexp(1.0, 128) ? std::copysign(HUGE_VAL, x) : value;
}

void expect_bf16(Bf16 actual, double x) {
  const double expected = nearest_bf16(x);
  ASSERT_EQ(to_float(actual), expected) << "of " << std::hexfloat << x;
  ASSERT_EQ(std::signbit(to_float(actual)), std::signbit(x)) << "of " << std::hexfloat << x;
}

TEST(Bf16, EveryCodeSurvivesARoundTrip) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = to_float(Bf16{static_cast<uint16_t>(code)});
    ASSERT_EQ(std::bit_cast<uint32_t>(value), code << 16);
    const uint32_t expected = std::isnan(value) ? 0x7fff : code;
    ASSERT_EQ(to_bf16(value).bits, expected);
    ASSERT_EQ(to_bf16(static_cast<double>(value)).bits, expected);
  }
}

TEST(Bf16, FromFloatRoundsToNearestEven) {
  for_dense_floats([](float x) {
    if (std::isnan(x)) {
      ASSERT_EQ(to_bf16(x).bits, 0x7fff);
    } else {
      expect_bf16(to_bf16(x), x);
    }
  });
}

TEST(Bf16, FromDoubleRoundsOnce) {
  // Just past the middle of 1 and 1 + 2^-7: fp32 would land on the middle, and the tie would go to 1.
  EXPECT_EQ(to_float(to_bf16(0x1.01p0 + 0x1p-40)), 0x1.02p0f);
  EXPECT_EQ(to_float(to_bf16(static_cast<float>(0x1.01p0 + 0x1p-40))), 1.0f);
  for (uint32_t code = 0; code < 0x7f80; ++code) {
    const double low = std::ldexp(code % 128 + (code < 128 ? 0 : 128), std::max(int(code / 128), 1) - 134);
    const double middle = low + std::ldexp(1.0, std::max(int(code / 128), 1) - 135);
    for (double x : {middle, std::nextafter(middle, 0.0), std::nextafter(middle, HUGE_VAL)}) {
      expect_bf16(to_bf16(x), x);
      expect_bf16(to_bf16(-x), -x);
    }
  }
}

TEST(Bf16, FromDoubleKeepsWhatFloatCannotHold) {
  EXPECT_EQ(to_bf16(1e300).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-1e300).bits, 0xff80);
  EXPECT_EQ(to_bf16(1e-300).bits, 0x0000);
  EXPECT_EQ(to_bf16(-1e-300).bits, 0x8000);
  EXPECT_EQ(to_bf16(-HUGE_VAL).bits, 0xff80);
  EXPECT_EQ(to_bf16(std::numeric_limits<double>::quiet_NaN()).bits, 0x7fff);
}

// e4m3 from its definition: (-1)^s * 2^(e - 7) * (1 + m / 8), or (-1)^s * 2^-6 * m / 8 for e = 0.
double e4m3_value(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 15);
  const int mantissa = static_cast<int>(code & 7);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest of all finite codes; of two equally near, the one with an even last bit.
uint32_t nearest_e4m3(float x) {
  const double magnitude = std::abs(static_cast<double>(x));
  uint32_t best = 0;
  for (uint32_t code = 1; code <= 0x7e; ++code) {
    const double distance = std::abs(e4m3_value(code) - magnitude);
    const double best_distance = std::abs(e4m3_value(best) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80u : 0u);
}

TEST(E4m3, EveryCodeDecodesAndSurvivesARoundTrip) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = to_float(E4m3{static_cast<uint8_t>(code)});
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(to_e4m3(value).bits, 0x7f);
    } else {
      EXPECT_EQ(value, e4m3_value(code));
      EXPECT_EQ(std::signbit(value), code >= 0x80);
      EXPECT_EQ(to_e4m3(value).bits, code);
    }
  }
}

TEST(E4m3, RoundsToNearestEvenAndSaturates) {
  for_dense_floats([](float x) {
    if (std::isnan(x)) {
      ASSERT_EQ(to_e4m3(x).bits, 0x7f);
    } else if (std::isinf(x)) {
      ASSERT_EQ(to_e4m3(x).bits, x > 0 ? 0x7e : 0xfe);
    } else {
      ASSERT_EQ(to_e4m3(x).bits, nearest_e4m3(x)) << "of " << std::hexfloat << x;
    }
  });
}

TEST(E8m0, EveryCodeIsItsPowerOfTwoAndHasAnExactReciprocal) {
  for (uint32_t code = 0; code < 255; ++code) {
    const E8m0 scale{static_cast<uint8_t>(code)};
    EXPECT_EQ(to_float(scale), std::ldexp(1.0, static_cast<int>(code) - 127));
    EXPECT_EQ(static_cast<double>(to_float(scale)) * to_float(reciprocal(scale)), 1.0);
  }
  EXPECT_TRUE(std::isnan(to_float(E8m0{0xff})));
  EXPECT_EQ(reciprocal(E8m0{0xff}).bits, 0xff);
}

TEST(E8m0, RoundUpIsTheSmallestScaleThatDoesNotSaturate) {
  for_dense_floats([](float amax) {
    if (std::signbit(amax)) return;
    const E8m0 scale = e8m0_round_up(amax, kE4m3Max);
    if (!std::isfinite(amax)) {
      ASSERT_EQ(scale.bits, 0xff);
      return;
    }
    ASSERT_NE(scale.bits, 0xff);
    ASSERT_LE(amax / static_cast<double>(to_float(scale)), 448) << std::hexfloat << amax;
    if (scale.bits == 0) return;
    ASSERT_GT(amax / static_cast<double>(to_float(scale)), 224) << std::hexfloat << amax;
  });
}

TEST(Convert, IsExactFromStorageAndRoundsOnceToIt) {
  EXPECT_EQ(convert<double>(Bf16{0x3fc0}), 1.5);
  EXPECT_EQ(convert<float>(E4m3{0x39}), 1.125f);
  EXPECT_EQ(convert<Bf16>(0x1.01p0 + 0x1p-40).bits, 0x3f81);
  EXPECT_EQ(convert<float>(1.0 + 0x1p-30), 1.0f);
  EXPECT_EQ(convert<double>(0.5f), 0.5);
  EXPECT_EQ(convert<Bf16>(Bf16{0xffc1}).bits, 0xffc1);  // no conversion: even a NaN keeps its bits
}

struct Fp8Group {
  explicit Fp8Group(const std::vector<float>& x) : codes(x.size()) {
    const int64_t count = static_cast<int64_t>(x.size());
    scale = quantize_fp8(dense(x.data(), 1, count), dense(codes.data(), 1, count));
  }
  std::vector<E4m3> codes;
  float scale;
};

struct MxGroup {
  explicit MxGroup(const std::vector<float>& x) : codes(x.size()) {
    const int64_t count = static_cast<int64_t>(x.size());
    scale = to_float(quantize_mx(dense(x.data(), 1, count), dense(codes.data(), 1, count)));
  }
  std::vector<E4m3> codes;
  float scale;
};

// Each element is off by at most half a step of e4m3 around it, and by `slack` relative for the roundings of the scale.
template <class Group>
void expect_within_half_a_step(const Group& group, const std::vector<float>& x, double slack) {
  for (size_t i = 0; i < x.size(); ++i) {
    const double code = to_float(group.codes[i]);
    const double scaled = std::abs(x[i] / static_cast<double>(group.scale));
    const double step = std::ldexp(1.0, std::max(scaled > 0 ? std::ilogb(scaled) : -6, -6) - 3);
    ASSERT_LE(std::abs(x[i] - code * group.scale), (step / 2 + slack * scaled) * group.scale)
        << "element " << i << " = " << std::hexfloat << x[i] << ", scale " << group.scale;
  }
}

std::vector<float> random_group(size_t count, int exponent, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = std::ldexp(normal(random), exponent);
  return x;
}

float largest_magnitude(const std::vector<float>& x) {
  float largest = 0;
  for (float value : x) largest = std::max(largest, std::abs(value));
  return largest;
}

TEST(BlockScale, Fp8GroupsOfEveryMagnitudeKeepTheBound) {
  std::mt19937 random(1);
  for (int exponent = -148; exponent <= 124; ++exponent) {
    const std::vector<float> x = random_group(kFp8Group, exponent, random);
    const Fp8Group group(x);
    expect_within_half_a_step(group, x, 0x1p-22);
    if (exponent < -110) continue;  // below, the smallest scale takes over and 448 is not reached
    const float amax = largest_magnitude(x);
    EXPECT_EQ(group.scale, static_cast<float>(static_cast<double>(amax) * (1.0f / 448.0f)));
    EXPECT_EQ(fp8_scale(amax).inverse, static_cast<float>(448.0 / amax));
    uint32_t largest_code = 0;
    for (E4m3 code : group.codes) largest_code = std::max(largest_code, code.bits & 0x7fu);
    EXPECT_EQ(largest_code, 0x7eu);
  }
}

TEST(BlockScale, MxGroupsOfEveryMagnitudeKeepTheBoundExactly) {
  std::mt19937 random(2);
  for (int exponent = -148; exponent <= 124; ++exponent) {
    const std::vector<float> x = random_group(kMxGroup, exponent, random);
    const MxGroup group(x);
    expect_within_half_a_step(group, x, 0);
    EXPECT_LE(largest_magnitude(x) / static_cast<double>(group.scale), 448);
  }
}

TEST(BlockScale, ZeroGroupHasScaleOne) {
  const std::vector<float> x = {0.0f, -0.0f, 0.0f};
  EXPECT_EQ(Fp8Group(x).scale, 1.0f);
  EXPECT_EQ(MxGroup(x).scale, 1.0f);
  for (const auto& codes : {Fp8Group(x).codes, MxGroup(x).codes}) {
    EXPECT_EQ(codes[0].bits, 0x00);
    EXPECT_EQ(codes[1].bits, 0x80);
  }
}

// 448 / amax overflows here: without the smallest scale the zeros would become NaN.
TEST(BlockScale, ZerosBesideTheTiniestValuesStayZero) {
  const std::vector<float> x = {0.0f, 0x1p-133f, -0x1p-149f};
  const Fp8Group group(x);
  EXPECT_EQ(group.scale, 0x1p-126f);
  EXPECT_EQ(group.codes[0].bits, 0x00);
  EXPECT_EQ(to_float(group.codes[1]), 0x1p-7f);
  EXPECT_EQ(group.codes[2].bits, 0x80);
}

TEST(BlockScale, AnOutlierIsExactAndPushesTheSmallOnesToSubnormalsOrZero) {
  std::vector<float> x(kFp8Group, 1.0f);
  x[1] = 0.25f;
  x[5] = -448.0f * 512;
  const Fp8Group fp8(x);
  EXPECT_EQ(fp8.scale, 512.0f);
  EXPECT_EQ(to_float(fp8.codes[5]), -448.0f);
  EXPECT_EQ(to_float(fp8.codes[0]), 0x1p-9f);
  EXPECT_EQ(fp8.codes[1].bits, 0x00);
  x[5] = -449.0f * 512;  // the scale rounds up to the next power of two, and nothing saturates
  const MxGroup mx(x);
  EXPECT_EQ(mx.scale, 1024.0f);
  EXPECT_EQ(to_float(mx.codes[5]), -224.0f);
}

TEST(BlockScale, NaNStaysWithItsElementAndInfinityTakesTheGroup) {
  const std::vector<float> with_nan = {kNaN, 448.0f, -2.0f, kNaN};
  for (const auto& codes : {Fp8Group(with_nan).codes, MxGroup(with_nan).codes}) {
    EXPECT_EQ(codes[0].bits, 0x7f);
    EXPECT_EQ(to_float(codes[1]), 448.0f);
    EXPECT_EQ(to_float(codes[2]), -2.0f);
    EXPECT_EQ(codes[3].bits, 0x7f);
  }
  const std::vector<float> with_infinity = {1.0f, -HUGE_VALF, 0.0f};
  const Fp8Group fp8(with_infinity);
  const MxGroup mx(with_infinity);
  for (size_t i = 0; i < with_infinity.size(); ++i) {
    EXPECT_TRUE(std::isnan(to_float(fp8.codes[i]) * fp8.scale));
    EXPECT_TRUE(std::isnan(to_float(mx.codes[i]) * mx.scale));
  }
}

TEST(BlockScale, ATransposedBlockHasTheSameCodesAndScale) {
  std::mt19937 random(3);
  const std::vector<float> values = random_group(static_cast<size_t>(kFp8Group * kFp8Group), 0, random);
  std::vector<Bf16> x(values.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = to_bf16(values[i]);
  std::vector<E4m3> codes(x.size());
  std::vector<float> transposed(x.size());
  const auto block = dense(x.data(), kFp8Group, kFp8Group);
  const float scale = quantize_fp8(block, dense(codes.data(), kFp8Group, kFp8Group));
  const float transposed_scale = quantize_fp8(block.transposed(), dense(transposed.data(), kFp8Group, kFp8Group));
  EXPECT_EQ(scale, transposed_scale);
  for (int64_t row = 0; row < kFp8Group; ++row) {
    for (int64_t col = 0; col < kFp8Group; ++col) {
      ASSERT_EQ(transposed[static_cast<size_t>(col * kFp8Group + row)],
                to_float(codes[static_cast<size_t>(row * kFp8Group + col)]));
    }
  }
}

TEST(BlockScale, FloatGroupsMayBeQuantizedInPlace) {
  std::mt19937 random(4);
  std::vector<float> x = random_group(kMxGroup, 3, random);
  const MxGroup expected(x);
  EXPECT_EQ(to_float(quantize_mx(dense(x.data(), 1, kMxGroup), dense(x.data(), 1, kMxGroup))), expected.scale);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i], to_float(expected.codes[i]));
}

TEST(Recipe, EveryPrecisionIsListedOnceUnderItsOwnName) {
  const std::vector<weft_precision> all = {WEFT_PRECISION_FP64, WEFT_PRECISION_FP32,    WEFT_PRECISION_BF16,
                                           WEFT_PRECISION_FP8,  WEFT_PRECISION_FP8_BWD, WEFT_PRECISION_MXFP8};
  EXPECT_EQ(std::size(kRecipes), all.size());
  std::set<std::string> names;
  for (weft_precision precision : all) {
    const Recipe& recipe = recipe_of(precision);
    EXPECT_EQ(recipe.precision, precision);
    EXPECT_EQ(&recipe_of(recipe.name), &recipe);
    EXPECT_TRUE(names.insert(recipe.name).second) << recipe.name;
  }
}

TEST(Recipe, UnknownPrecisionsAreRefusedWithTheAllowedNames) {
  const std::string allowed = R"("fp64", "fp32", "bf16", "fp8", "fp8_bwd", "mxfp8")";
  EXPECT_EQ(precision_names(), allowed);
  try {
    recipe_of("fp16");
    FAIL() << "fp16 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), WEFT_INVALID_ARGUMENT);
    EXPECT_EQ(error.what(), "precision \"fp16\" is unknown; allowed: " + allowed);
  }
  try {
    recipe_of(static_cast<weft_precision>(7));
    FAIL() << "7 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), WEFT_INVALID_ARGUMENT);
    EXPECT_EQ(error.what(), "precision 7 is not a weft_precision; allowed: " + allowed);
  }
}

int64_t group_of(OperandFormat format) {
  switch (format) {
    case OperandFormat::kExact:
    case OperandFormat::kBf16:
      return 1;
    case OperandFormat::kE4m3Row128:
    case OperandFormat::kE4m3Block128:
      return kFp8Group;
    case OperandFormat::kMxE4m3:
      return kMxGroup;
  }
  return 0;
}

TEST(Recipe, ShapesDivideIntoWholeGroupsAndFormatsFitTheDataDtype) {
  for (const Recipe& recipe : kRecipes) {
    for (GemmKind kind : {GemmKind::kForward, GemmKind::kDgrad, GemmKind::kWgrad}) {
      const GemmFormats formats = recipe.formats(kind);
      for (OperandFormat format : {formats.activation, formats.other}) {
        EXPECT_EQ(recipe.hidden_multiple % group_of(format), 0) << recipe.name;
        EXPECT_EQ(recipe.intermediate_multiple % group_of(format), 0) << recipe.name;
        EXPECT_EQ(format == OperandFormat::kExact, recipe.data_dtype != WEFT_DTYPE_BF16) << recipe.name;
      }
    }
    EXPECT_EQ(recipe.cpu_only, recipe.data_dtype != WEFT_DTYPE_BF16) << recipe.name;
  }
}

TEST(Recipe, Fp8BwdQuantizesOnlyDgrad) {
  constexpr Recipe recipe = kRecipeOf<WEFT_PRECISION_FP8_BWD>;
  EXPECT_EQ(recipe.formats(GemmKind::kForward).activation, OperandFormat::kBf16);
  EXPECT_EQ(recipe.formats(GemmKind::kDgrad).activation, OperandFormat::kE4m3Row128);
  EXPECT_EQ(recipe.formats(GemmKind::kDgrad).other, OperandFormat::kE4m3Block128);
  EXPECT_EQ(recipe.formats(GemmKind::kWgrad).activation, OperandFormat::kBf16);
}

TEST(Recipe, DtypesHaveTheSizesOfTheirTypes) {
  EXPECT_EQ(dtype_bytes(WEFT_DTYPE_FP64), sizeof(double));
  EXPECT_EQ(dtype_bytes(WEFT_DTYPE_FP32), sizeof(float));
  EXPECT_EQ(dtype_bytes(WEFT_DTYPE_BF16), sizeof(Bf16));
}

}  // namespace
}  // namespace weft
