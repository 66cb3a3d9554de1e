// Words for Python: an exception thrown here crosses torch's boxed kernel and arrives in Python as
//     std::invalid_argument -> ValueError      OutOfMemory -> MemoryError      std::runtime_error -> RuntimeError
// Knows the C ABI's status codes, and neither tensors nor groups.
#pragma once

#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "weft/weft.h"

namespace weft_torch {

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string words) : words_(std::move(words)) {}
  const char* what() const noexcept override { return words_.c_str(); }

 private:
  std::string words_;
};

template <class... Parts>
std::string words(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Refuses a wrong input: ValueError.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::invalid_argument(words("weft: ", parts...));
}

// Turns a failed C ABI call into an exception with the words of weft_last_error().
inline void check(weft_status status) {
  if (status == WEFT_OK) return;
  const std::string said = words("weft: ", weft_last_error());
  switch (status) {
    case WEFT_INVALID_ARGUMENT:
      throw std::invalid_argument(said);
    case WEFT_OUT_OF_MEMORY:
      throw OutOfMemory(said);
    default:
      throw std::runtime_error(said);
  }
}

}  // namespace weft_torch
