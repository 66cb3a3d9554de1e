#include "reference/product.hpp"

#include <Eigen/Core>
#include <cmath>
#include <vector>

#include "core/math.hpp"
#include "numeric/block_scale.hpp"
#include "numeric/convert.hpp"

namespace weft {
namespace {

template <class Real>
using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// An operand as the tensor core sees it: values [rows, k], and in scaled formats a scale for each (row, group of K).
template <class Real>
struct Operand {
  Matrix<Real> values;
  std::vector<float> scales;
  int64_t group;  // K elements a scale; the whole K where there is none
};

template <class Real>
Span2d<Real> span_of(Matrix<Real>& matrix) {
  return dense(matrix.data(), matrix.rows(), matrix.cols());
}

template <class Real, class T>
void read_values(Span2d<const T> source, Matrix<Real>& values) {
  for (int64_t row = 0; row < source.rows; ++row) {
    for (int64_t col = 0; col < source.cols; ++col) values(row, col) = convert<Real>(source.at(row, col));
  }
}

// Quantises in place, groups of `group_rows` x `group` elements, and repeats a group's scale for each of its rows.
template <class Quantize>
void scale_groups(Operand<float>& operand, int64_t group_rows, Quantize quantize) {
  const int64_t rows = operand.values.rows();
  const int64_t depth = operand.values.cols();
  const int64_t num_groups = ceil_div(depth, operand.group);
  operand.scales.resize(static_cast<size_t>(rows * num_groups));
  const Span2d<float> values = span_of(operand.values);
  for (int64_t row = 0; row < rows; row += group_rows) {
    const int64_t num_rows = min_of(group_rows, rows - row);
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t k = group * operand.group;
      const Span2d<float> block = values.block(row, k, num_rows, min_of(operand.group, depth - k));
      const float scale = quantize(block);
      for (int64_t r = row; r < row + num_rows; ++r) {
        operand.scales[static_cast<size_t>(r * num_groups + group)] = scale;
      }
    }
  }
}

template <class Real, class T>
Operand<Real> read_operand(Span2d<const T> source, OperandFormat format) {
  Operand<Real> operand{Matrix<Real>(source.rows, source.cols), {}, source.cols};
  read_values(source, operand.values);
  if constexpr (std::is_same_v<Real, float>) {
    const auto fp8 = [](Span2d<float> block) { return quantize_fp8(block, block); };
    switch (format) {
      case OperandFormat::kExact:
        break;
      case OperandFormat::kBf16:
        operand.values = operand.values.unaryExpr([](float x) { return to_float(to_bf16(x)); });
        break;
      case OperandFormat::kE4m3Row128:
        operand.group = kFp8Group;
        scale_groups(operand, 1, fp8);
        break;
      case OperandFormat::kE4m3Block128:
        operand.group = kFp8Group;
        scale_groups(operand, kFp8Group, fp8);
        break;
      case OperandFormat::kMxE4m3:
        operand.group = kMxGroup;
        scale_groups(operand, 1, [](Span2d<float> block) { return to_float(quantize_mx(block, block)); });
        break;
    }
  }
  return operand;
}

// sum += A B^T, group after group of K, each group's sum scaled before it is added.
void add_scaled(const Operand<float>& a, const Operand<float>& b, Matrix<float>& sum) {
  const int64_t depth = a.values.cols();
  const int64_t num_groups = ceil_div(depth, a.group);
  Matrix<float> group_sum(sum.rows(), sum.cols());
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t k = group * a.group;
    const int64_t length = min_of(a.group, depth - k);
    group_sum.noalias() = a.values.middleCols(k, length) * b.values.middleCols(k, length).transpose();
    for (int64_t m = 0; m < sum.rows(); ++m) {
      const float a_scale = a.scales[static_cast<size_t>(m * num_groups + group)];
      for (int64_t n = 0; n < sum.cols(); ++n) {
        const float scale = a_scale * b.scales[static_cast<size_t>(n * num_groups + group)];
        sum(m, n) = std::fma(group_sum(m, n), scale, sum(m, n));
      }
    }
  }
}

}  // namespace

template <class Real, class A, class B>
void product(Span2d<const A> a, OperandFormat a_format, Span2d<const B> b, OperandFormat b_format, Span2d<Real> c,
             Accumulate accumulate) {
  Matrix<Real> sum = Matrix<Real>::Zero(c.rows, c.cols);
  if (accumulate == Accumulate::kAdd) read_values(Span2d<const Real>(c), sum);
  if (a.cols > 0) {
    const Operand<Real> a_operand = read_operand<Real>(a, a_format);
    const Operand<Real> b_operand = read_operand<Real>(b, b_format);
    if (a_operand.scales.empty()) {
      sum.noalias() += a_operand.values * b_operand.values.transpose();
    } else if constexpr (std::is_same_v<Real, float>) {
      add_scaled(a_operand, b_operand, sum);
    }
  }
  for (int64_t m = 0; m < c.rows; ++m) {
    for (int64_t n = 0; n < c.cols; ++n) c.at(m, n) = sum(m, n);
  }
}

// Rows (Real, before rounding) against weights (data dtype), and rows against rows in wgrad.
#define WEFT_INSTANTIATE(Real, B) \
  template void product(Span2d<const Real>, OperandFormat, Span2d<const B>, OperandFormat, Span2d<Real>, Accumulate)
WEFT_INSTANTIATE(float, Bf16);
WEFT_INSTANTIATE(float, float);
WEFT_INSTANTIATE(double, double);
#undef WEFT_INSTANTIATE

}  // namespace weft
