// A strided view of a matrix: element (row, col) lies at data[row * row_stride + col * col_stride]. Swapping the two
// strides transposes without a copy, which is how the backward reads weights and rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/annotations.hpp"

namespace weft {

template <class T>
struct Span2d {
  T* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;

  WEFT_HD T& at(int64_t row, int64_t col) const { return data[row * row_stride + col * col_stride]; }
  WEFT_HD Span2d block(int64_t row, int64_t col, int64_t num_rows, int64_t num_cols) const {
    return {data + row * row_stride + col * col_stride, num_rows, num_cols, row_stride, col_stride};
  }
  WEFT_HD Span2d transposed() const { return {data, cols, rows, col_stride, row_stride}; }
  // A template, so that Span2d<const T> declares no conversion to itself.
  template <class U>
  requires std::is_same_v<U, const T> WEFT_HD operator Span2d<U>() const {
    return {data, rows, cols, row_stride, col_stride};
  }
};

// A dense row-major matrix of num_cols columns.
template <class T>
WEFT_HD Span2d<T> dense(T* data, int64_t num_rows, int64_t num_cols) {
  return {data, num_rows, num_cols, num_cols, 1};
}

}  // namespace weft
