#include "debug.hpp"

#include <torch/csrc/stable/library.h>

#include <array>
#include <limits>
#include <mutex>
#include <utility>

#include "errors.hpp"
#include "tensors.hpp"

namespace weft_torch {
namespace {

std::mutex mutex;  // of all that is kept here

Debug& current() {
  static Debug& debug = *new Debug;  // never destroyed: its tensor's device may be gone when the process ends
  return debug;
}

std::array<int64_t, 3> num_backwards{};  // by weft_backward_source

uint32_t narrow(int64_t value, const char* name) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  require(value >= 0 && value <= kMost, name, " is ", value, "; allowed: 0 to ", kMost);
  return static_cast<uint32_t>(value);
}

}  // namespace

Debug debug_of_call() {
  const std::lock_guard lock(mutex);
  Debug debug = current();
  ++current().options.delay_seed;
  return debug;
}

void set_debug(int64_t schedule, int64_t skipped_phases, std::optional<Tensor> trace, int64_t max_delay_ns,
               int64_t delay_seed) {
  require(schedule >= WEFT_SCHEDULE_AUTO && schedule <= WEFT_SCHEDULE_PHASED, "schedule is ", schedule,
          "; allowed: 0 to ", int{WEFT_SCHEDULE_PHASED});
  Debug debug;
  debug.schedule = static_cast<weft_schedule>(schedule);
  WEFT_INIT(debug.options);
  debug.options.skipped_phases = narrow(skipped_phases, "skipped_phases");
  debug.options.max_delay_ns = narrow(max_delay_ns, "max_delay_ns");
  debug.options.delay_seed = narrow(delay_seed, "delay_seed");
  if (trace) {
    require(!trace->is_cpu() && trace->is_contiguous() && trace->scalar_type() == ScalarType::Long, "trace is a ",
            name_of(trace->scalar_type()), " tensor on ", name_of(trace->device()),
            "; it must be a contiguous one of torch.int64 on a GPU");
    debug.options.trace = trace->mutable_data_ptr();
    debug.options.trace_bytes = trace->numel() * static_cast<int64_t>(sizeof(int64_t));
  }
  debug.trace = std::move(trace);
  const std::lock_guard lock(mutex);
  current() = std::move(debug);
}

void count_backward(weft_backward_source source) {
  const std::lock_guard lock(mutex);
  ++num_backwards.at(source);
}

std::tuple<int64_t, int64_t, int64_t> backward_sources() {
  const std::lock_guard lock(mutex);
  return {num_backwards[WEFT_SOURCE_SAVED], num_backwards[WEFT_SOURCE_WORKSPACE],
          num_backwards[WEFT_SOURCE_RECOMPUTED]};
}

}  // namespace weft_torch

STABLE_TORCH_LIBRARY_FRAGMENT(weft, library) {
  library.def("set_debug(int schedule, int skipped_phases, Tensor? trace, int max_delay_ns, int delay_seed) -> ()");
  library.def("backward_sources() -> (int saved, int workspace, int recomputed)");
}

STABLE_TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, library) {
  library.impl("set_debug", TORCH_BOX(&weft_torch::set_debug));
  library.impl("backward_sources", TORCH_BOX(&weft_torch::backward_sources));
}
