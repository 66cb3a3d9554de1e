// Tensors: checks of those that Python hands over, whose refusals name the tensor, what it is and what is allowed; and
// memory as a tensor.
// Knows torch's stable headers only; does not know groups or layers.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace weft_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<int64_t>;

// As Python writes it.
inline std::string name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string name_of(const torch::stable::Device& device) {
  switch (device.type()) {
    case torch::headeronly::DeviceType::CPU:
      return "cpu";
    case torch::headeronly::DeviceType::CUDA:
      return words("cuda:", device.index());
    default:
      return words("device type ", static_cast<int>(device.type()));
  }
}

// Prints as Python writes a list; formatted only when it is printed.
template <class Ints>
struct ListOf {
  Ints ints;
  friend std::ostream& operator<<(std::ostream& stream, const ListOf& list) {
    const char* separator = "[";
    for (const int64_t value : list.ints) {
      stream << separator << value;
      separator = ", ";
    }
    return stream << (*separator == '[' ? "[]" : "]");
  }
};
template <class Ints>
ListOf<Ints> list_of(Ints ints) {
  return {std::move(ints)};
}

inline Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// `shape` is how the documentation writes it, e.g. "[T, H]"; `sizes` are the numbers of this call.
inline void require_tensor(const Tensor& tensor, const std::string& name, const char* shape, const Sizes& sizes,
                           ScalarType dtype, const torch::stable::Device& device) {
  require(tensor.device() == device, name, " is on ", name_of(tensor.device()), ", x is on ", name_of(device),
          ": all tensors of a call must be on one device");
  require(tensor.scalar_type() == dtype, name, " has dtype ", name_of(tensor.scalar_type()), ", must be ",
          name_of(dtype), " here");
  const Sizes actual = sizes_of(tensor);
  require(actual == sizes, name, " has shape ", list_of(actual), ", must be ", shape, " = ", list_of(sizes));
  require(tensor.is_contiguous(), name, " has strides ", list_of(tensor.strides()), " for shape ", list_of(actual),
          ": it must be contiguous (call .contiguous())");
}

// A tensor of bytes on the device of `like`.
inline Tensor allocate(const Tensor& like, int64_t bytes, const char* what) {
  try {
    return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  } catch (const std::runtime_error&) {  // torch keeps its own words back
    throw OutOfMemory(words("weft: cannot allocate ", bytes, " bytes for ", what, ": lower max_tokens of the group"));
  }
}

inline void require_dims(const Tensor& tensor, const std::string& name, const char* shape, int64_t dims) {
  require(tensor.dim() == dims, name, " has shape ", list_of(tensor.sizes()), ", must be ", shape);
}

}  // namespace weft_torch
