#include "api/validate.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "core/status.hpp"
#include "layout/carver.hpp"

namespace weft {
namespace {

// Far above any model, and low enough that no size computed from them leaves 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 20;  // of hidden and of intermediate
constexpr int32_t kMaxExperts = 1 << 16;
constexpr int32_t kMaxWorkers = 1024;

// An enumerator as the caller wrote it: a value outside of the enumeration must be readable without undefined
// behaviour.
template <class Enum>
int raw(const Enum& value) {
  int number = 0;
  static_assert(sizeof(value) == sizeof(number));
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

template <class... Parts>
void require_argument(bool condition, const Parts&... parts) {
  require(condition, WEFT_INVALID_ARGUMENT, parts...);
}

void require_choice(int value, int num_choices, const char* name, const char* allowed) {
  require_argument(value >= 0 && value < num_choices, name, " is ", value, "; allowed: ", allowed);
}

std::string dtype_words(int dtype) {
  switch (dtype) {
    case WEFT_DTYPE_FP64:
      return "fp64";
    case WEFT_DTYPE_FP32:
      return "fp32";
    case WEFT_DTYPE_BF16:
      return "bf16";
    default:
      return words(dtype, ", which is no weft_dtype");
  }
}

void require_pointer(const void* pointer, const char* name, const char* shape) {
  require_argument(pointer != nullptr, name, " is NULL; it must point to ", shape);
}

void check_width(int64_t value, int64_t multiple, const char* name, const Recipe& recipe) {
  require_argument(value > 0 && value <= kMaxWidth && value % multiple == 0, name, " is ", value, "; precision ",
                   recipe.name, " allows positive multiples of ", multiple, " up to ", kMaxWidth);
}

void validate_inputs(const weft_config& config, const weft_inputs& inputs) {
  require_argument(inputs.num_tokens >= 0 && inputs.num_tokens <= config.max_tokens, "num_tokens is ",
                   inputs.num_tokens, "; allowed: 0 to max_tokens = ", config.max_tokens,
                   "; create the layer with a larger max_tokens");
  if (inputs.num_tokens > 0) {
    require_pointer(inputs.x, "x", "[T, H]");
    require_pointer(inputs.topk_idx, "topk_idx", "[T, K]");
    require_pointer(inputs.topk_weights, "topk_weights", "[T, K]");
  }
  require_pointer(inputs.down, "down", "[e, H, I]");
  const bool together = inputs.gate_up != nullptr;
  const bool apart = inputs.gate != nullptr && inputs.up != nullptr;
  require_argument(together != apart && (!together || (inputs.gate == nullptr && inputs.up == nullptr)),
                   "expert weights must come as gate_up [e, 2I, H], or as both gate and up [e, I, H]; got gate_up ",
                   together ? "set" : "NULL", ", gate ", inputs.gate != nullptr ? "set" : "NULL", ", up ",
                   inputs.up != nullptr ? "set" : "NULL");
}

void validate_debug(const weft_config& config, const weft_debug* caller_debug) {
  if (caller_debug == nullptr) return;
  constexpr uint32_t kMostDelayNs = 1000000;  // that a GPU sleeps at once
  const weft_debug debug = read_struct(caller_debug, "args.debug");
  require(config.backend == WEFT_BACKEND_CUDA, WEFT_UNSUPPORTED,
          "phases to skip, a trace or delays are asked for (args.debug), which the CUDA backend alone has; pass NULL");
  require_argument((debug.skipped_phases & ~uint32_t{WEFT_PHASE_ALL}) == 0, "skipped_phases is ", debug.skipped_phases,
                   "; allowed: a sum of WEFT_PHASE_*, or 0 for none");
  require(debug.skipped_phases == 0 || config.ep_size == 1, WEFT_UNSUPPORTED, "skipped_phases is ",
          debug.skipped_phases, " with ", config.ep_size,
          " ranks, of which the others would wait for what is skipped; allowed on one rank");
  require_argument(debug.max_delay_ns <= kMostDelayNs, "max_delay_ns is ", debug.max_delay_ns,
                   "; allowed: 0 for none, to ", kMostDelayNs);
  constexpr auto kLeastBytes = static_cast<int64_t>(2 * sizeof(weft_trace_record));
  require_argument(debug.trace == nullptr || debug.trace_bytes >= kLeastBytes, "trace_bytes is ", debug.trace_bytes,
                   "; the count and one record take ", kLeastBytes);
  require_argument(reinterpret_cast<uintptr_t>(debug.trace) % alignof(weft_trace_record) == 0,
                   "trace must be aligned to ", alignof(weft_trace_record), " bytes");
}

// An array of a call; null where it is not given.
struct Extent {
  const char* name;
  const void* begin;
  int64_t bytes;

  bool meets(const Extent& other) const {
    if (begin == nullptr || other.begin == nullptr || bytes == 0 || other.bytes == 0) return false;
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const auto second = reinterpret_cast<uintptr_t>(other.begin);
    return first < second + static_cast<uintptr_t>(other.bytes) && second < first + static_cast<uintptr_t>(bytes);
  }
};

// Results are stored while other tiles still read what a call brings.
void require_apart(std::span<const Extent> written, std::span<const Extent> read) {
  for (size_t n = 0; n < written.size(); ++n) {
    const auto require_apart_from = [&](const Extent& other) {
      require_argument(!written[n].meets(other), written[n].name, " overlaps ", other.name,
                       "; what a call writes must lie apart from all else that it is given");
    };
    for (const Extent& other : read) require_apart_from(other);
    for (const Extent& other : written.subspan(n + 1)) require_apart_from(other);
  }
}

// The arrays of a call whose sizes follow from the configuration.
struct Extents {
  Extents(const weft_config& config, const weft_inputs& inputs)
      : data_bytes(dtype_bytes(recipe_of(config.precision).data_dtype)),
        rows(inputs.num_tokens * config.hidden),
        routes(inputs.num_tokens * config.top_k),
        weight(config.num_experts / config.ep_size * config.hidden * config.intermediate),
        read{{"x", inputs.x, rows * data_bytes},
             {"topk_idx", inputs.topk_idx, routes * int64_t{sizeof(int32_t)}},
             {"topk_weights", inputs.topk_weights, routes * int64_t{sizeof(float)}},
             {"gate_up", inputs.gate_up, 2 * weight * data_bytes},
             {"gate", inputs.gate, weight * data_bytes},
             {"up", inputs.up, weight * data_bytes},
             {"down", inputs.down, weight * data_bytes}} {}

  int64_t data_bytes;
  int64_t rows;  // elements of [T, H]
  int64_t routes;
  int64_t weight;  // elements of [e, I, H]
  std::vector<Extent> read;
};

void validate_workspace(const void* workspace, int64_t bytes, int64_t needed) {
  require_pointer(workspace, "workspace", "workspace_bytes of weft_query_sizes");
  require_argument(reinterpret_cast<uintptr_t>(workspace) % kArrayAlignment == 0, "workspace must be aligned to ",
                   kArrayAlignment, " bytes");
  require_argument(bytes >= needed, "workspace has ", bytes, " bytes; this configuration needs ", needed,
                   " (weft_query_sizes)");
}

}  // namespace

// Bytes of a struct in its first release: the least that a caller may bring. Fields added later are zero for a caller
// that does not know them; a release that adds one specialises this.
template <class Struct>
constexpr size_t kFirstSize = sizeof(Struct);

template <class Struct>
Struct read_struct(const Struct* caller, const char* name) {
  require_argument(caller != nullptr, name, " is NULL");
  size_t size = 0;
  std::memcpy(&size, caller, sizeof(size));
  require_argument(size >= kFirstSize<Struct> && size <= sizeof(Struct), name, ".struct_size is ", size,
                   "; this library takes ", kFirstSize<Struct>, " to ", sizeof(Struct),
                   ": set it with WEFT_INIT and build against the header of this library or an older one");
  Struct copy{};
  std::memcpy(&copy, caller, size);
  return copy;
}
template weft_config read_struct(const weft_config*, const char*);
template weft_sizes read_struct(const weft_sizes*, const char*);
template weft_inputs read_struct(const weft_inputs*, const char*);
template weft_forward_args read_struct(const weft_forward_args*, const char*);
template weft_backward_args read_struct(const weft_backward_args*, const char*);

void validate_deadline(double deadline_s) {
  require_argument(std::isfinite(deadline_s) && deadline_s >= 0, "deadline_s is ", deadline_s,
                   "; allowed: a positive number of seconds, or 0 for 300");
}

void validate_config(const weft_config& config) {
  require_choice(raw(config.backend), 2, "backend", "WEFT_BACKEND_CPU, WEFT_BACKEND_CUDA");
  require_choice(raw(config.save), 2, "save", "WEFT_SAVE_GATE_UP, WEFT_SAVE_INPUTS");
  require_choice(raw(config.schedule), 3, "schedule", "WEFT_SCHEDULE_AUTO, _OVERLAPPED, _PHASED");
  require_argument(raw(config.precision) >= 0 && raw(config.precision) < static_cast<int>(std::size(kRecipes)),
                   "precision is ", raw(config.precision), "; allowed: 0 to ", std::size(kRecipes) - 1, " for ",
                   precision_names());
  const Recipe& recipe = recipe_of(config.precision);
  check_width(config.hidden, recipe.hidden_multiple, "hidden", recipe);
  check_width(config.intermediate, recipe.intermediate_multiple, "intermediate", recipe);
  require_argument(config.ep_size >= 1 && config.ep_size <= kMaxRanks, "ep_size is ", config.ep_size,
                   "; allowed: 1 to ", kMaxRanks);
  require_argument(config.ep_rank >= 0 && config.ep_rank < config.ep_size, "ep_rank is ", config.ep_rank,
                   "; allowed: 0 to ep_size - 1 = ", config.ep_size - 1);
  require_argument(
      config.num_experts >= 1 && config.num_experts <= kMaxExperts && config.num_experts % config.ep_size == 0,
      "num_experts is ", config.num_experts, "; it must be a positive multiple of ep_size = ", config.ep_size,
      ", at most ", kMaxExperts);
  const int32_t most = min_of(config.num_experts, kMaxTopK);
  require_argument(config.top_k >= 1 && config.top_k <= most, "top_k is ", config.top_k, "; allowed: 1 to ", most,
                   " (the smaller of num_experts and ", kMaxTopK, ")");
  const int64_t most_routes = std::numeric_limits<int32_t>::max() - int64_t{kBlockRows} * config.num_experts;
  const int64_t most_tokens = most_routes / (int64_t{config.ep_size} * config.top_k);
  require_argument(config.max_tokens >= 0 && config.max_tokens <= most_tokens, "max_tokens is ", config.max_tokens,
                   "; allowed: 0 to ", most_tokens, ", as at most ", most_routes,
                   " routes (ep_size * max_tokens * top_k) can fall on one rank");
  require_argument(std::isfinite(config.clamp_limit) && config.clamp_limit >= 0, "clamp_limit is ", config.clamp_limit,
                   "; allowed: a positive limit, or 0 for none");
  require_argument(config.capacity_rows >= 0, "capacity_rows is ", config.capacity_rows,
                   "; allowed: a positive number of rows, or 0 for the default");
  require_argument(config.num_workers >= 0 && config.num_workers <= kMaxWorkers, "num_workers is ", config.num_workers,
                   "; allowed: 1 to ", kMaxWorkers, ", or 0 for the default");
  validate_deadline(config.deadline_s);
}

LayerShape shape_of(const weft_config& config) {
  LayerShape shape{config.hidden,  config.intermediate, config.num_experts, config.top_k,
                   config.ep_size, config.ep_rank,      config.max_tokens,  0};
  const int64_t routes = config.max_tokens * config.top_k;
  const int64_t wanted = config.capacity_rows > 0
                             ? ceil_div<int64_t>(min_of(config.capacity_rows, shape.max_pool_rows()), kBlockRows)
                             : ceil_div<int64_t>(routes + routes / 4, kBlockRows) + shape.num_local_experts();
  shape.capacity_blocks = static_cast<int32_t>(max_of<int64_t>(1, min_of(wanted, shape.max_blocks())));
  return shape;
}

void validate_forward(const weft_config& config, const weft_forward_args& args, const weft_inputs& inputs,
                      int64_t workspace_bytes, int64_t saved_bytes) {
  validate_inputs(config, inputs);
  validate_debug(config, args.debug);
  validate_workspace(args.workspace, args.workspace_bytes, workspace_bytes);
  if (inputs.num_tokens > 0) require_pointer(args.y, "y", "[T, H]");
  if (config.save == WEFT_SAVE_GATE_UP) {
    require_pointer(args.saved, "saved", "saved_bytes of weft_query_sizes (save = WEFT_SAVE_GATE_UP)");
  } else {
    require_argument(args.saved == nullptr, "saved is set, but the layer has save = WEFT_SAVE_INPUTS; pass NULL");
  }
  const Extents extents(config, inputs);
  const Extent written[] = {{"y", args.y, extents.rows * extents.data_bytes},
                            {"saved", args.saved, saved_bytes},
                            {"workspace", args.workspace, args.workspace_bytes}};
  require_apart(written, extents.read);
}

void validate_backward(const weft_config& config, const weft_backward_args& args, const weft_inputs& inputs,
                       int64_t workspace_bytes, int64_t saved_bytes) {
  validate_inputs(config, inputs);
  validate_debug(config, args.debug);
  validate_workspace(args.workspace, args.workspace_bytes, workspace_bytes);
  if (inputs.num_tokens > 0) {
    require_pointer(args.dy, "dy", "[T, H]");
    if (args.want_dx != 0) require_pointer(args.dx, "dx", "[T, H] (want_dx is set)");
    if (args.want_dtopk_weights != 0) {
      require_pointer(args.dtopk_weights, "dtopk_weights", "[T, K] (want_dtopk_weights is set)");
    }
  }
  if (config.save == WEFT_SAVE_GATE_UP) {
    require_pointer(args.saved, "saved", "what the forward saved (save = WEFT_SAVE_GATE_UP)");
  } else {
    require_argument(args.saved == nullptr, "saved is set, but the layer has save = WEFT_SAVE_INPUTS; pass NULL");
  }
  require_argument(
      (args.dgate == nullptr) == (args.dup == nullptr) && !(args.dgate_up != nullptr && args.dgate != nullptr),
      "gate and up gradients must come as dgate_up [e, 2I, H], or as both dgate and dup [e, I, H]");

  const Recipe& recipe = recipe_of(config.precision);
  const int dtype = raw(args.grad_dtype);
  require_argument(dtype == recipe.data_dtype || (dtype == WEFT_DTYPE_FP32 && recipe.data_dtype == WEFT_DTYPE_BF16),
                   "grad_dtype is ", dtype_words(dtype), "; precision ", recipe.name, " allows ",
                   dtype_words(recipe.data_dtype), " (its data dtype)",
                   recipe.data_dtype == WEFT_DTYPE_BF16 ? " or fp32" : "");
  require_argument(
      args.accumulate == 0 || dtype != WEFT_DTYPE_BF16,
      "accumulate needs gradients in fp32 (fp64 in precision fp64), not in bf16: small steps would be lost");

  Extents extents(config, inputs);
  extents.read.push_back({"dy", args.dy, extents.rows * extents.data_bytes});
  extents.read.push_back({"saved", args.saved, saved_bytes});
  const int64_t weight_bytes = extents.weight * dtype_bytes(args.grad_dtype);
  const Extent written[] = {{"dx", args.want_dx != 0 ? args.dx : nullptr, extents.rows * extents.data_bytes},
                            {"dtopk_weights", args.want_dtopk_weights != 0 ? args.dtopk_weights : nullptr,
                             extents.routes * int64_t{sizeof(float)}},
                            {"dgate_up", args.dgate_up, 2 * weight_bytes},
                            {"dgate", args.dgate, weight_bytes},
                            {"dup", args.dup, weight_bytes},
                            {"ddown", args.ddown, weight_bytes},
                            {"workspace", args.workspace, args.workspace_bytes}};
  require_apart(written, extents.read);
}

}  // namespace weft
