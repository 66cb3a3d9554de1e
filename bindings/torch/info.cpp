// Ops without tensors: groups by number, and what this build is and can run.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "errors.hpp"
#include "group.hpp"

namespace weft_torch {
namespace {

int64_t create_local(int64_t ep_size) { return register_group(create_local_group(ep_size)); }

int64_t create_shared(std::string name, int64_t ep_rank, int64_t ep_size, double deadline_s) {
  return register_group(create_shared_group(name, ep_rank, ep_size, deadline_s));
}

int64_t member(int64_t group, int64_t rank) { return register_group(find_group(group)->member(rank)); }

void destroy(int64_t group) { remove_group(group); }

// Tells the other ranks that this one cannot make the call that they wait in, or will; nothing where there are none.
void refuse(int64_t group, std::string reason, double deadline_s) {
  const std::shared_ptr<Group> found = find_group(group);
  if (!found->has_peers()) return;
  const auto locks = found->lock();
  for (size_t r = 0; r < found->size(); ++r) check(weft_refuse(found->rank(r).group(), reason.c_str(), deadline_s));
}

// The largest number of tokens that a rank of the group brings, this one `num_tokens`; of a group of processes.
int64_t agree_on_max_tokens(int64_t group, int64_t num_tokens, double deadline_s) {
  const std::shared_ptr<Group> found = find_group(group);
  const auto locks = found->lock();
  int64_t max_tokens = num_tokens;
  check(weft_group_max_tokens(found->rank(0).group(), num_tokens, deadline_s, &max_tokens));
  return max_tokens;
}

// Throws what a device has found wrong in calls that have run by now: one fault of one layer, once.
void check_layers(int64_t group) {
  const std::shared_ptr<Group> found = find_group(group);
  const auto locks = found->lock();
  for (size_t r = 0; r < found->size(); ++r) {
    for (const auto& [key, layer] : found->rank(r).layers()) check(weft_layer_check(layer.handle.get()));
  }
}

// Which number the C ABI cannot take, or "": narrowed it could look right. ep_size first, since num_experts follows it.
std::string beyond_int32(int64_t num_experts, int64_t top_k, int64_t ep_size) {
  using Limits = std::numeric_limits<int32_t>;
  for (const auto& [name, value] :
       {std::pair{"ep_size", ep_size}, std::pair{"num_experts", num_experts}, std::pair{"top_k", top_k}}) {
    if (value < Limits::min() || value > Limits::max()) {
      return words(name, " is ", value, "; it must fit into 32 bits");
    }
  }
  return "";
}

weft_config config_of(bool cpu, int64_t hidden, int64_t intermediate, int64_t num_experts, int64_t top_k,
                      int64_t ep_size, int64_t precision, int64_t save, int64_t max_tokens, double clamp_limit) {
  LayerKey key{};
  key.backend = cpu ? WEFT_BACKEND_CPU : WEFT_BACKEND_CUDA;
  key.precision = static_cast<weft_precision>(precision);
  key.hidden = hidden;
  key.intermediate = intermediate;
  key.num_experts = static_cast<int32_t>(num_experts);
  key.top_k = static_cast<int32_t>(top_k);
  key.max_tokens = max_tokens;
  key.clamp_limit = clamp_limit;
  key.save = static_cast<weft_save>(save);
  return weft_torch::config_of(key, /*ep_rank=*/0, static_cast<int32_t>(ep_size));
}

// "" or why not, with the remedy.
std::string supports(bool cpu, int64_t hidden, int64_t intermediate, int64_t num_experts, int64_t top_k,
                     int64_t ep_size, int64_t precision, int64_t max_tokens, bool training) {
  if (const std::string reason = beyond_int32(num_experts, top_k, ep_size); !reason.empty()) return reason;
  const weft_config config = config_of(cpu, hidden, intermediate, num_experts, top_k, ep_size, precision,
                                       WEFT_SAVE_GATE_UP, max_tokens, /*clamp_limit=*/0);
  return (training ? weft_supports_training : weft_supports)(&config) == WEFT_OK ? "" : weft_last_error();
}

weft_sizes sizes_of(bool cpu, int64_t hidden, int64_t intermediate, int64_t num_experts, int64_t top_k, int64_t ep_size,
                    int64_t precision, int64_t save, int64_t max_tokens, double clamp_limit) {
  const std::string reason = beyond_int32(num_experts, top_k, ep_size);
  require(reason.empty(), reason);
  const weft_config config =
      config_of(cpu, hidden, intermediate, num_experts, top_k, ep_size, precision, save, max_tokens, clamp_limit);
  weft_sizes sizes;
  WEFT_INIT(sizes);
  check(weft_query_sizes(&config, &sizes));
  return sizes;
}

// Bytes of a forward's `saved` tensor of one rank; fake kernels need them before anything runs.
int64_t saved_bytes(int64_t group, bool cpu, int64_t hidden, int64_t intermediate, int64_t num_experts, int64_t top_k,
                    int64_t precision, int64_t save, int64_t max_tokens, double clamp_limit) {
  return sizes_of(cpu, hidden, intermediate, num_experts, top_k, find_group(group)->ep_size(), precision, save,
                  max_tokens, clamp_limit)
      .saved_bytes;
}

// Bytes that one rank needs: workspace, the part of it that a forward needs, saved, symmetric data, symmetric flags.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> memory_bytes(bool cpu, int64_t hidden, int64_t intermediate,
                                                                     int64_t num_experts, int64_t top_k,
                                                                     int64_t ep_size, int64_t precision, int64_t save,
                                                                     int64_t max_tokens) {
  const weft_sizes sizes = sizes_of(cpu, hidden, intermediate, num_experts, top_k, ep_size, precision, save, max_tokens,
                                    /*clamp_limit=*/0);
  return {sizes.workspace_bytes, sizes.forward_workspace_bytes, sizes.saved_bytes, sizes.symmetric_bytes,
          sizes.symmetric_flag_bytes};
}

std::string version() { return weft_version(); }
std::string compiler() {
#if defined(__clang__)
  return __VERSION__;
#else
  return "g++ " __VERSION__;
#endif
}

}  // namespace
}  // namespace weft_torch

STABLE_TORCH_LIBRARY(weft, library) {
  library.def("create_local_group(int ep_size) -> int");
  library.def("create_shared_group(str name, int ep_rank, int ep_size, float deadline_s) -> int");
  library.def("group_member(int group, int rank) -> int");
  library.def("destroy_group(int group) -> ()");
  library.def("refuse(int group, str reason, float deadline_s) -> ()");
  library.def("agree_on_max_tokens(int group, int num_tokens, float deadline_s) -> int");
  library.def("check_layers(int group) -> ()");
  library.def(
      "supports(bool cpu, int hidden, int intermediate, int num_experts, int top_k, int ep_size, int precision, "
      "int max_tokens, bool training) -> str");
  library.def(
      "saved_bytes(int group, bool cpu, int hidden, int intermediate, int num_experts, int top_k, int precision, "
      "int save, int max_tokens, float clamp_limit) -> int");
  library.def(
      "memory_bytes(bool cpu, int hidden, int intermediate, int num_experts, int top_k, int ep_size, int precision, "
      "int save, int max_tokens) -> (int, int, int, int, int)");
  library.def("version() -> str");
  library.def("compiler() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, library) {
  library.impl("create_local_group", TORCH_BOX(&weft_torch::create_local));
  library.impl("create_shared_group", TORCH_BOX(&weft_torch::create_shared));
  library.impl("group_member", TORCH_BOX(&weft_torch::member));
  library.impl("destroy_group", TORCH_BOX(&weft_torch::destroy));
  library.impl("refuse", TORCH_BOX(&weft_torch::refuse));
  library.impl("agree_on_max_tokens", TORCH_BOX(&weft_torch::agree_on_max_tokens));
  library.impl("check_layers", TORCH_BOX(&weft_torch::check_layers));
  library.impl("supports", TORCH_BOX(&weft_torch::supports));
  library.impl("saved_bytes", TORCH_BOX(&weft_torch::saved_bytes));
  library.impl("memory_bytes", TORCH_BOX(&weft_torch::memory_bytes));
  library.impl("version", TORCH_BOX(&weft_torch::version));
  library.impl("compiler", TORCH_BOX(&weft_torch::compiler));
}
