// The C ABI: translates handles and errors, decides what is collective, and hands the work to the backend. No exception
// leaves it.
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "api/backends.hpp"
#include "api/group.hpp"
#include "api/validate.hpp"
#include "core/status.hpp"
#include "symmetric/memory.hpp"
#include "weft/weft.h"

struct weft_group : weft::RankGroup {
  using RankGroup::RankGroup;
};

struct weft_layer {
  weft_config config;
  weft_group* group;
  uint32_t fingerprint;
  std::unique_ptr<weft::BackendLayer> backend;
};

namespace weft {
namespace {

thread_local std::string last_error;

// What a call of a layer asked for, for the words of an allocation that failed without any of its own.
std::string asked_for(const weft_config& config) {
  return words(" (max_tokens ", config.max_tokens, ", hidden ", config.hidden, ", intermediate ", config.intermediate,
               ", num_experts ", config.num_experts, ", num_workers ", config.num_workers,
               "); lower max_tokens or num_workers, or leave this process more memory");
}

// Runs the body of an API function; an exception becomes a status and words. Where the layer is known, `config` is its
// configuration.
template <class Body>
weft_status guarded(Body body, const weft_config* config = nullptr) {
  try {
    last_error.clear();
    body();
    return WEFT_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return error.status();
  } catch (const std::bad_alloc&) {
    try {
      last_error = "out of host memory";
      if (config != nullptr) last_error += asked_for(*config);
    } catch (const std::bad_alloc&) {  // what could be said is said
    }
    return WEFT_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error = words("internal error: ", error.what());
    return WEFT_INTERNAL;
  }
}

void create_layer(const weft_config* caller_config, weft_group* group, weft_layer** layer) {
  require(group != nullptr && layer != nullptr, WEFT_INVALID_ARGUMENT, "group or layer is NULL");
  *layer = nullptr;
  auto created = std::make_unique<weft_layer>();
  group->or_refuse(kDefaultDeadline, [&] {
    created->config = read_struct(caller_config, "config");
    validate_config(created->config);
    require(created->config.ep_size == group->num_ranks() && created->config.ep_rank == group->rank(),
            WEFT_INVALID_ARGUMENT, "config says rank ", created->config.ep_rank, " of ", created->config.ep_size,
            ", the group says rank ", group->rank(), " of ", group->num_ranks());
    created->backend = make_backend_layer(created->config);
    group->prepare_memory(created->backend->memory_kind());
  });
  created->group = group;
  const double deadline_s = deadline_or_default(created->config.deadline_s);
  created->fingerprint = group->agree_on(created->config, deadline_s);
  // Only now: allocating may wait for a device, whose kernels wait for peers that have yet to launch theirs until then.
  group->or_refuse(deadline_s, [&] { created->backend->prepare(created->fingerprint); });
  group->reserve(created->backend->memory_kind(), created->backend->symmetric_flag_bytes(),
                 created->backend->symmetric_data_bytes(), deadline_s);
  *layer = created.release();
}

// Meets the other ranks at the entry of a call that this rank has staged.
uint32_t enter(weft_layer* layer, const Call& call) {
  try {
    return layer->group->meet(call, deadline_or_default(layer->config.deadline_s));
  } catch (...) {
    layer->backend->leave();
    throw;
  }
}

// Runs `launch`, which starts kernels of `layer`. Where ranks share a process none goes on before all have launched:
// what it did next in CUDA could wait for its own kernels and keep a peer from launching what those wait for.
template <class Launch>
void launch_together(weft_layer* layer, const RankMemory& memory, CallKind launched, void* stream,
                     const Launch& launch) {
  if (!memory.ranks_share_process) return launch();
  const double deadline_s = deadline_or_default(layer->config.deadline_s);
  try {
    layer->group->or_refuse(deadline_s, launch);
    layer->group->meet({launched, layer->fingerprint}, deadline_s);
  } catch (...) {
    layer->backend->leave();
    try {
      layer->backend->join(stream);
    } catch (const Error&) {
      // The first error is the thing to say.
    }
    throw;
  }
  layer->backend->join(stream);
}

void forward(weft_layer* layer, weft_forward_args* caller_args) {
  require(layer != nullptr, WEFT_INVALID_ARGUMENT, "layer is NULL");
  weft_group& group = *layer->group;
  const RankMemory memory = group.rank_memory(layer->backend->memory_kind());
  weft_forward_args args;
  weft_inputs inputs;
  group.or_refuse(deadline_or_default(layer->config.deadline_s), [&] {
    args = read_struct(caller_args, "args");
    inputs = read_struct(args.inputs, "args.inputs");
    args.inputs = &inputs;
    validate_forward(layer->config, args, inputs, layer->backend->forward_workspace_bytes(),
                     layer->backend->saved_bytes());
    layer->backend->check_reported();
    layer->backend->check_forward(args);
    layer->backend->stage(memory, args);
  });
  const uint32_t epoch = enter(layer, {CallKind::kForward, layer->fingerprint});
  int32_t num_passes = 1;
  launch_together(layer, memory, CallKind::kForwardLaunched, args.stream,
                  [&] { num_passes = layer->backend->forward(memory, epoch, args); });
  group.advance(num_passes - 1);
  caller_args->generation = args.generation;
}

void backward(weft_layer* layer, weft_backward_args* caller_args) {
  require(layer != nullptr, WEFT_INVALID_ARGUMENT, "layer is NULL");
  weft_group& group = *layer->group;
  const RankMemory memory = group.rank_memory(layer->backend->memory_kind());
  weft_backward_args args;
  weft_inputs inputs;
  group.or_refuse(deadline_or_default(layer->config.deadline_s), [&] {
    args = read_struct(caller_args, "args");
    inputs = read_struct(args.inputs, "args.inputs");
    args.inputs = &inputs;
    validate_backward(layer->config, args, inputs, layer->backend->workspace_bytes(), layer->backend->saved_bytes());
    layer->backend->check_reported();
    layer->backend->check_backward(args);
    layer->backend->stage(memory, args);
  });
  // Whether dx and the router gradients travel is everybody's affair: two bits of the fingerprint.
  const uint32_t wants = (args.want_dx != 0 ? 1U : 0U) | (args.want_dtopk_weights != 0 ? 2U : 0U);
  const uint32_t epoch = enter(layer, {CallKind::kBackward, (layer->fingerprint << 2) | wants});
  int32_t num_passes = 1;
  launch_together(layer, memory, CallKind::kBackwardLaunched, args.stream,
                  [&] { num_passes = layer->backend->backward(memory, epoch, args); });
  group.advance(num_passes - 1);
  caller_args->source = args.source;
}

// How much a status says of what went wrong: a rank's own fault more than what its peers saw of it.
int32_t weight_of(weft_status status) {
  if (status == WEFT_OK) return 0;
  return status == WEFT_PEER_REFUSED || status == WEFT_STALLED ? 1 : 2;
}

// Runs `call(rank_idx)` for n ranks of this process at once, each with the caller's current device; the status and
// words that say most are the result. `group_of(rank_idx)` may be NULL.
template <class Call, class GroupOf>
weft_status on_all_ranks(int32_t n, bool has_arrays, Call call, GroupOf group_of) {
  weft_status worst = WEFT_OK;
  std::string worst_words;
  const weft_status launched = guarded([&] {
    require(n >= 0 && (n == 0 || has_arrays), WEFT_INVALID_ARGUMENT, "n is ", n,
            " or an array is NULL; every array must have n entries");
    std::mutex mutex;
    const auto run = [&](int32_t rank_idx) {
      const weft_status status = call(rank_idx);
      const std::lock_guard lock(mutex);
      if (weight_of(status) <= weight_of(worst)) return;
      worst = status;
      worst_words = last_error;
    };
    const std::function<void()> set_device = current_device_setter();
    std::string failure;
    std::vector<std::jthread> threads;  // joined however this ends
    threads.reserve(static_cast<size_t>(n));
    try {
      for (int32_t rank_idx = 1; rank_idx < n; ++rank_idx) {
        threads.emplace_back([&, rank_idx] {
          set_device();
          run(rank_idx);
        });
      }
      if (n > 0) run(0);
    } catch (const std::exception& error) {  // a thread, or the memory for it
      const auto missing = static_cast<int32_t>(threads.size()) + 1;
      failure = words("cannot start a thread for rank ", missing, " of ", n, ": ", error.what(),
                      "; raise the limits of the process");
      // The ranks without one tell the others, which would wait for them.
      weft_refuse(group_of(0), failure.c_str(), kDefaultDeadline);
      for (int32_t rank_idx = missing; rank_idx < n; ++rank_idx) {
        weft_refuse(group_of(rank_idx), failure.c_str(), kDefaultDeadline);
      }
    }
    require(failure.empty(), WEFT_OUT_OF_MEMORY, failure);
  });
  if (launched != WEFT_OK) return launched;
  last_error = worst_words;
  return worst;
}

weft_group* group_of(const weft_layer* layer) { return layer != nullptr ? layer->group : nullptr; }

}  // namespace
}  // namespace weft

using namespace weft;  // the C functions below are the global face of this namespace

extern "C" {

const char* weft_last_error(void) { return last_error.c_str(); }

#define WEFT_STRING_OF(x) #x
#define WEFT_VERSION_STRING(major, minor, patch) \
  WEFT_STRING_OF(major) "." WEFT_STRING_OF(minor) "." WEFT_STRING_OF(patch)
const char* weft_version(void) {
  return WEFT_VERSION_STRING(WEFT_VERSION_MAJOR, WEFT_VERSION_MINOR, WEFT_VERSION_PATCH);
}

weft_status weft_supports(const weft_config* config) {
  return guarded([&] {
    const weft_config copy = read_struct(config, "config");
    validate_config(copy);
    check_backend(copy);
  });
}

weft_status weft_supports_training(const weft_config* config) {
  return weft_supports(config);  // every backend has both
}

weft_status weft_query_sizes(const weft_config* caller_config, weft_sizes* sizes) {
  return guarded([&] {
    const weft_config config = read_struct(caller_config, "config");
    read_struct(sizes, "sizes");
    validate_config(config);
    const auto layer = make_backend_layer(config);
    sizes->workspace_bytes = layer->workspace_bytes();
    sizes->forward_workspace_bytes = layer->forward_workspace_bytes();
    sizes->saved_bytes = config.save == WEFT_SAVE_GATE_UP ? layer->saved_bytes() : 0;
    sizes->symmetric_bytes = layer->symmetric_data_bytes();
    sizes->symmetric_flag_bytes = layer->symmetric_flag_bytes();
    sizes->capacity_rows = shape_of(config).capacity_rows();
  });
}

weft_dtype weft_data_dtype(weft_precision precision) {
  weft_dtype dtype = WEFT_DTYPE_BF16;
  guarded([&] { dtype = recipe_of(precision).data_dtype; });
  return dtype;
}

weft_status weft_group_create_local(int32_t ep_size, weft_group** groups) {
  return guarded([&] {
    require(groups != nullptr, WEFT_INVALID_ARGUMENT, "groups is NULL; it must have room for ep_size pointers");
    require(ep_size >= 1 && ep_size <= kMaxRanks, WEFT_INVALID_ARGUMENT, "ep_size is ", ep_size, "; allowed: 1 to ",
            kMaxRanks);
    auto memories = make_in_process_memory(ep_size);
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      groups[rank] =
          new weft_group(std::move(memories[static_cast<size_t>(rank)]), kDefaultDeadline, make_device_memory);
    }
  });
}

weft_status weft_group_create_shared(const char* name, int32_t ep_rank, int32_t ep_size, double deadline_s,
                                     weft_group** group) {
  return guarded([&] {
    require(name != nullptr && group != nullptr, WEFT_INVALID_ARGUMENT, "name or group is NULL");
    require(ep_size >= 1 && ep_size <= kMaxRanks, WEFT_INVALID_ARGUMENT, "ep_size is ", ep_size, "; allowed: 1 to ",
            kMaxRanks);
    require(ep_rank >= 0 && ep_rank < ep_size, WEFT_INVALID_ARGUMENT, "ep_rank is ", ep_rank,
            "; allowed: 0 to ep_size - 1 = ", ep_size - 1);
    validate_deadline(deadline_s);
    const double deadline = deadline_or_default(deadline_s);
    auto joined = std::make_unique<weft_group>(make_shared_memory(name, ep_rank, ep_size, deadline), deadline,
                                               make_device_memory);
    joined->join();
    *group = joined.release();
  });
}

void weft_group_destroy(weft_group* group) { delete group; }

weft_status weft_layer_create(const weft_config* config, weft_group* group, weft_layer** layer) {
  return guarded([&] { create_layer(config, group, layer); });
}

void weft_layer_destroy(weft_layer* layer) { delete layer; }

weft_status weft_layer_check(weft_layer* layer) {
  return guarded([&] {
    require(layer != nullptr, WEFT_INVALID_ARGUMENT, "layer is NULL");
    layer->backend->check_reported();
  });
}

weft_status weft_forward(weft_layer* layer, weft_forward_args* args) {
  return guarded([&] { forward(layer, args); }, layer != nullptr ? &layer->config : nullptr);
}

weft_status weft_backward(weft_layer* layer, weft_backward_args* args) {
  return guarded([&] { backward(layer, args); }, layer != nullptr ? &layer->config : nullptr);
}

weft_status weft_refuse(weft_group* group, const char* reason, double deadline_s) {
  return guarded([&] {
    require(group != nullptr && reason != nullptr, WEFT_INVALID_ARGUMENT, "group or reason is NULL");
    group->refuse(reason, deadline_or_default(deadline_s));
  });
}

weft_status weft_group_max_tokens(weft_group* group, int64_t num_tokens, double deadline_s, int64_t* max_tokens) {
  return guarded([&] {
    require(group != nullptr && max_tokens != nullptr, WEFT_INVALID_ARGUMENT, "group or max_tokens is NULL");
    validate_deadline(deadline_s);
    *max_tokens = group->agree_on_max_tokens(num_tokens, deadline_or_default(deadline_s));
  });
}

weft_status weft_layer_create_all(const weft_config* const* configs, weft_group* const* groups, int32_t n,
                                  weft_layer** layers) {
  return on_all_ranks(
      n, configs && groups && layers,
      [&](int32_t rank) { return weft_layer_create(configs[rank], groups[rank], &layers[rank]); },
      [&](int32_t rank) { return groups[rank]; });
}

weft_status weft_forward_all(weft_layer* const* layers, weft_forward_args* const* args, int32_t n) {
  return on_all_ranks(
      n, layers && args, [&](int32_t rank) { return weft_forward(layers[rank], args[rank]); },
      [&](int32_t rank) { return group_of(layers[rank]); });
}

weft_status weft_backward_all(weft_layer* const* layers, weft_backward_args* const* args, int32_t n) {
  return on_all_ranks(
      n, layers && args, [&](int32_t rank) { return weft_backward(layers[rank], args[rank]); },
      [&](int32_t rank) { return group_of(layers[rank]); });
}

}  // extern "C"
