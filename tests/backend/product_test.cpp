// The tile product against its definition: operands rounded group by group, as docs/numerics.md has the groups, and
// summed in double. A group of another shape, or a scale at another place, is off by many times the tolerance.
#include "reference/product.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "numeric/block_scale.hpp"

namespace weft {
namespace {

// No multiples of a group: every edge is ragged.
constexpr int64_t kRows = 130;
constexpr int64_t kCols = 140;
constexpr int64_t kDepth = 300;

// Normal values whose magnitude changes from element to element, so that neighbouring groups have different scales.
std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-6, 6);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = std::ldexp(normal(random), exponent(random));
  return values;
}

struct Group {
  int64_t rows;
  int64_t depth;
};

Group group_of(OperandFormat format) {
  switch (format) {
    case OperandFormat::kE4m3Row128:
      return {1, 128};
    case OperandFormat::kE4m3Block128:
      return {128, 128};
    case OperandFormat::kMxE4m3:
      return {1, 32};
    default:
      return {1, 1};
  }
}

// What the elements of an operand are worth in a format.
std::vector<double> worth(Span2d<const float> operand, OperandFormat format) {
  std::vector<double> values;
  for (int64_t row = 0; row < operand.rows; ++row) {
    for (int64_t k = 0; k < operand.cols; ++k) {
      const Group group = group_of(format);
      const int64_t first_row = row / group.rows * group.rows;
      const int64_t first_k = k / group.depth * group.depth;
      float amax = 0;
      for (int64_t r = first_row; r < std::min(first_row + group.rows, operand.rows); ++r) {
        for (int64_t d = first_k; d < std::min(first_k + group.depth, operand.cols); ++d) {
          amax = std::max(amax, std::abs(operand.at(r, d)));
        }
      }
      const float x = operand.at(row, k);
      switch (format) {
        case OperandFormat::kExact:
          values.push_back(x);
          break;
        case OperandFormat::kBf16:
          values.push_back(to_float(to_bf16(x)));
          break;
        case OperandFormat::kMxE4m3: {
          const GroupScale<E8m0> scale = mx_scale(amax);
          values.push_back(double{to_float(to_e4m3(x * scale.inverse))} * to_float(scale.scale));
          break;
        }
        default: {
          const GroupScale<float> scale = fp8_scale(amax);
          values.push_back(double{to_float(to_e4m3(x * scale.inverse))} * scale.scale);
          break;
        }
      }
    }
  }
  return values;
}

struct Formats {
  const char* name;
  OperandFormat a;
  OperandFormat b;
};

class EveryFormat : public ::testing::TestWithParam<Formats> {
 protected:
  // Scales that are powers of two change a rounding only where they make subnormals: an outlier in every group of a
  // does, and b hides it from the sums.
  EveryFormat() {
    constexpr int64_t kSmallestGroup = 32;
    constexpr float kOutlier = 0x1p14F;
    for (int64_t k = 7; k < kDepth; k += kSmallestGroup) {
      for (int64_t m = 0; m < kRows; ++m) a_[static_cast<size_t>(m * kDepth + k)] *= kOutlier;
      for (int64_t n = 0; n < kCols; ++n) b_[static_cast<size_t>(k * kCols + n)] /= kOutlier;
    }
  }

  // b lies transposed in memory, as weights do in dgrad.
  Span2d<const float> a() const { return dense<const float>(a_.data(), kRows, kDepth); }
  Span2d<const float> b() const { return dense<const float>(b_.data(), kDepth, kCols).transposed(); }

  std::vector<float> a_ = random_values(kRows * kDepth, 1);
  std::vector<float> b_ = random_values(kCols * kDepth, 2);
  std::vector<float> c_ = std::vector<float>(static_cast<size_t>(kRows * kCols), NAN);
  Span2d<float> c() { return dense(c_.data(), kRows, kCols); }
};

TEST_P(EveryFormat, SumsWhatItsGroupsAreWorth) {
  product(a(), GetParam().a, b(), GetParam().b, c());
  const std::vector<double> a_worth = worth(a(), GetParam().a);
  const std::vector<double> b_worth = worth(b(), GetParam().b);
  for (int64_t m = 0; m < kRows; ++m) {
    for (int64_t n = 0; n < kCols; ++n) {
      double sum = 0;
      double magnitude = 0;
      for (int64_t k = 0; k < kDepth; ++k) {
        const double term = a_worth[static_cast<size_t>(m * kDepth + k)] * b_worth[static_cast<size_t>(n * kDepth + k)];
        sum += term;
        magnitude += std::abs(term);
      }
      // One rounding of fp32 for each addition, and a few for the scales.
      ASSERT_NEAR(c().at(m, n), sum, magnitude * (kDepth + 4) * 0x1p-24) << "row " << m << ", column " << n;
    }
  }
}

TEST_P(EveryFormat, GoesOnAsOneLongerContraction) {
  product(a(), GetParam().a, b(), GetParam().b, c());
  std::vector<float> parts(c_.size(), NAN);
  const Span2d<float> sum = dense(parts.data(), kRows, kCols);
  constexpr int64_t kFirst = 128;  // whole groups of every format
  product(a().block(0, 0, kRows, kFirst), GetParam().a, b().block(0, 0, kCols, kFirst), GetParam().b, sum);
  product(a().block(0, kFirst, kRows, kDepth - kFirst), GetParam().a, b().block(0, kFirst, kCols, kDepth - kFirst),
          GetParam().b, sum, Accumulate::kAdd);
  if (group_of(GetParam().a).depth > 1) {  // group after group: the same roundings
    EXPECT_EQ(std::memcmp(parts.data(), c_.data(), c_.size() * sizeof(float)), 0);
  }
  double difference = 0;
  double norm = 0;
  for (size_t n = 0; n < c_.size(); ++n) {
    difference += std::pow(double{parts[n]} - c_[n], 2);
    norm += std::pow(double{c_[n]}, 2);
  }
  EXPECT_LT(std::sqrt(difference / norm), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat,
                         ::testing::Values(Formats{"exact", OperandFormat::kExact, OperandFormat::kExact},
                                           Formats{"bf16", OperandFormat::kBf16, OperandFormat::kBf16},
                                           Formats{"fp8", OperandFormat::kE4m3Row128, OperandFormat::kE4m3Block128},
                                           Formats{"mxfp8", OperandFormat::kMxE4m3, OperandFormat::kMxE4m3}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Product, OfNoDepthIsZeroOrLeavesTheSumAlone) {
  std::vector<float> values = {1, 2, 3, 4};
  const Span2d<const float> none = dense<const float>(values.data(), 2, 0);
  product(none, OperandFormat::kBf16, none, OperandFormat::kBf16, dense(values.data(), 2, 2), Accumulate::kAdd);
  EXPECT_EQ(values, (std::vector<float>{1, 2, 3, 4}));
  product(none, OperandFormat::kBf16, none, OperandFormat::kBf16, dense(values.data(), 2, 2));
  EXPECT_EQ(values, (std::vector<float>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace weft
