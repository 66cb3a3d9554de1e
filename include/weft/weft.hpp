// weft.hpp - the C++ face of weft.h: handles that own what they hold, and exceptions in place of statuses. Header only.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "weft/weft.h"

namespace weft {

class Exception : public std::runtime_error {
 public:
  Exception(weft_status status, const char* words) : std::runtime_error(words), status_(status) {}
  weft_status status() const { return status_; }

 private:
  weft_status status_;
};

// Throws Exception with the words of the failed call.
inline void check(weft_status status) {
  if (status != WEFT_OK) throw Exception(status, weft_last_error());
}

// An ABI struct with its struct_size set and everything else zero.
template <class Struct>
Struct init() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

inline weft_sizes query_sizes(const weft_config& config) {
  auto sizes = init<weft_sizes>();
  check(weft_query_sizes(&config, &sizes));
  return sizes;
}

// This rank's membership of a group. Must outlive the layers made with it.
class Group {
 public:
  // All ranks of a group in this process.
  static std::vector<Group> local(int32_t ep_size) {
    std::vector<weft_group*> handles(static_cast<size_t>(ep_size > 0 ? ep_size : 0));
    check(weft_group_create_local(ep_size, handles.data()));
    std::vector<Group> groups;
    for (weft_group* handle : handles) groups.push_back(Group(handle));
    return groups;
  }
  // One rank a process; collective.
  static Group shared(const std::string& name, int32_t ep_rank, int32_t ep_size, double deadline_s = 0) {
    weft_group* handle = nullptr;
    check(weft_group_create_shared(name.c_str(), ep_rank, ep_size, deadline_s, &handle));
    return Group(handle);
  }

  Group(Group&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Group& operator=(Group&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Group() {
    if (handle_ != nullptr) weft_group_destroy(handle_);
  }
  weft_group* get() const { return handle_; }

 private:
  explicit Group(weft_group* handle) : handle_(handle) {}
  weft_group* handle_;
};

// One configuration on one rank. Making, running forward and backward are collective.
class Layer {
 public:
  Layer(const weft_config& config, const Group& group) { check(weft_layer_create(&config, group.get(), &handle_)); }
  Layer(Layer&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Layer& operator=(Layer&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Layer() {
    if (handle_ != nullptr) weft_layer_destroy(handle_);
  }

  void forward(weft_forward_args& args) { check(weft_forward(handle_, &args)); }
  void backward(weft_backward_args& args) { check(weft_backward(handle_, &args)); }
  weft_layer* get() const { return handle_; }

 private:
  weft_layer* handle_ = nullptr;
};

}  // namespace weft
