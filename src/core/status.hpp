// Error: what any room throws on the host, with the status the C ABI returns. Device code never throws.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "weft/weft.h"

namespace weft {

class Error : public std::runtime_error {
 public:
  Error(weft_status status, const std::string& words) : std::runtime_error(words), status_(status) {}
  weft_status status() const { return status_; }

 private:
  weft_status status_;
};

// Builds the words of an error from its parts: what was wrong, the value, what is allowed, the remedy.
template <class... Parts>
std::string words(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <class... Parts>
void require(bool condition, weft_status status, const Parts&... parts) {
  if (!condition) throw Error(status, words(parts...));
}

}  // namespace weft
