// Running a launch on host threads. The overlapped run is what a GPU does with warps: one communication worker and
// several matrix workers a rank, tickets, flags and gates, real data.
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/status.hpp"
#include "protocol/stall.hpp"
#include "reference/run.hpp"
#include "reference/stages.hpp"

namespace weft {
namespace {

// The task bodies on real data. Host copies are synchronous, so the memory policy has nothing to do here.
template <class Element, class Real>
class DataBodies {
 public:
  explicit DataBodies(const State<Element, Real>& state) : state_(state) {}

  void pull(const TaskOrder&, int32_t row, HostMemory&) { pull_row(state_, row); }
  void combine(const TaskOrder& order, int32_t entry_idx, HostMemory&) {
    combine_entry(state_, order, order.plan().entries[entry_idx]);
  }
  void sum_token(const TaskOrder& order, int32_t token, HostMemory&) { weft::sum_token(state_, order, token); }
  void matrix(const TaskOrder& order, const MatrixTask& task, HostMemory&) {
    switch (task.kind) {
      case TaskKind::kGateUp:
        return gate_up_tile(state_, order, task);
      case TaskKind::kDown:
        return down_tile(state_, order, task);
      case TaskKind::kDownDgrad:
        return down_dgrad_tile(state_, order, task);
      case TaskKind::kGateUpDgrad:
        return gate_up_dgrad_tile(state_, order, task);
      case TaskKind::kDownWgrad:
        return down_wgrad_tile(state_, order, task);
      case TaskKind::kGateUpWgrad:
        return gate_up_wgrad_tile(state_, order, task);
    }
  }

 private:
  const State<Element, Real>& state_;
};

[[noreturn]] void throw_stall(const StallReport& report, const Launch& launch, double deadline_s) {
  throw Error(WEFT_STALLED, describe(report, launch.rank(), deadline_s));
}

// Lets every rank's workers leave their gates, because this one cannot go on.
void abort_group(const Launch& launch) {
  for (int32_t peer = 0; peer < launch.num_ranks(); ++peer) {
    std::atomic_ref<uint32_t>(launch.controls[peer]->abort)
        .store(encode_abort(launch.rank(), -1), std::memory_order_release);
  }
}

}  // namespace

template <class Element, class Real>
void run_phased(State<Element, Real>& state, const RunOptions& options) {
  state.launch.num_workers = 1;
  HostMemory memory(options.deadline_s);
  DataBodies bodies(state);
  Worker worker(state.launch, memory, bodies);
  if (!worker.run_phased()) throw_stall(worker.report(), state.launch, options.deadline_s);
}

template <class Element, class Real>
void run_overlapped(State<Element, Real>& state, const RunOptions& options) {
  const int32_t num_workers = options.num_matrix_workers + 1;
  state.launch.num_workers = num_workers;

  std::vector<StallReport> reports(static_cast<size_t>(num_workers));
  std::mutex failure_mutex;
  std::exception_ptr failure;
  const auto fail = [&](const std::exception_ptr& reason) {
    const std::lock_guard lock(failure_mutex);
    if (!failure) failure = reason;
    abort_group(state.launch);
  };
  const auto work = [&](int32_t worker_idx) {
    HostMemory memory(options.deadline_s);
    DataBodies bodies(state);
    Worker worker(state.launch, memory, bodies);
    const bool is_comm = worker_idx == 0;
    try {
      worker.run(is_comm, is_comm);
    } catch (...) {
      fail(std::current_exception());
    }
    reports[static_cast<size_t>(worker_idx)] = worker.report();
  };

  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_workers));
  try {
    for (int32_t worker_idx = 1; worker_idx < num_workers; ++worker_idx) threads.emplace_back(work, worker_idx);
    work(0);
  } catch (const std::system_error& error) {
    fail(std::make_exception_ptr(Error(
        WEFT_OUT_OF_MEMORY, words("cannot start matrix worker ", threads.size() + 1, " of ", num_workers - 1, ": ",
                                  error.what(), "; lower num_workers or raise the limits of the process"))));
  }
  for (std::thread& thread : threads) thread.join();

  if (failure) std::rethrow_exception(failure);
  // The first to give up knows most; the others only saw its abort.
  const StallReport* stall = nullptr;
  for (const StallReport& report : reports) {
    if (report.stalled && (stall == nullptr || report.aborted_by < 0)) stall = &report;
  }
  if (stall != nullptr) throw_stall(*stall, state.launch, options.deadline_s);
}

#define INSTANTIATE(Element, Real)                                    \
  template void run_phased(State<Element, Real>&, const RunOptions&); \
  template void run_overlapped(State<Element, Real>&, const RunOptions&);
WEFT_FOR_EACH_DATA_TYPE(INSTANTIATE)
#undef INSTANTIATE

}  // namespace weft
