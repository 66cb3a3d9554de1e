// The plan kernel against the host: for every routing of tests/cases each rank's plan, task table and flags must be the
// host's, bit for bit, whatever the number of CTAs; what goes wrong must end in a report and leave the GPU usable. A
// program of its own, since a GPU machine need not have GoogleTest. `--time` adds timings.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cases/planned.hpp"
#include "core/status.hpp"
#include "cuda/launch/plan.hpp"
#include "protocol/stall.hpp"

namespace weft {
namespace {

int num_passed = 0;
int num_failed = 0;

void check(bool ok, const std::string& what) {
  ++(ok ? num_passed : num_failed);
  if (!ok) std::printf("FAILED %s\n", what.c_str());
}

void must(cudaError_t error, const char* what) {
  require(error == cudaSuccess, WEFT_INTERNAL, what, ": ", cudaGetErrorString(error));
}

class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t bytes) : bytes_(static_cast<size_t>(max_of<int64_t>(bytes, 1))) {
    must(cudaMalloc(&data_, bytes_), "cudaMalloc");
    fill(0);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void fill(int byte) { must(cudaMemset(data_, byte, bytes_), "cudaMemset"); }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <class T>
  void write(const T* values, size_t count) {
    must(cudaMemcpy(data_, values, count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  // A copy that a Carver can lay out again: aligned as the original.
  std::unique_ptr<cases::PoisonedMemory> read() const {
    auto copy = std::make_unique<cases::PoisonedMemory>(static_cast<int64_t>(bytes_));
    must(cudaMemcpy(copy->data(), data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
    return copy;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

template <class Carve>
int64_t bytes_of(Carve carve) {
  Carver carver;
  carve(carver);
  return carver.used();
}

// One rank of a group whose ranks share the device.
struct DeviceRank {
  DeviceRank(const LayerShape& rank_shape, const TaskChoice& task_choice)
      : shape(rank_shape),
        choice(task_choice),
        plan(bytes_of([&](Carver& carver) { carve_plan(carver, shape); })),
        scratch(bytes_of([&](Carver& carver) { carve_plan_scratch(carver, shape); })),
        table(bytes_of([&](Carver& carver) { carve_task_table(carver, shape, choice); })),
        flags(bytes_of([&](Carver& carver) { carve_local_flags(carver, shape); })),
        control(sizeof(ControlBlock)),
        topk_idx(shape.max_tokens * shape.top_k * static_cast<int64_t>(sizeof(int32_t))),
        topk_weights(shape.max_tokens * shape.top_k * static_cast<int64_t>(sizeof(float))),
        num_tokens(sizeof(int64_t)),
        report(sizeof(PlanReport)) {
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~DeviceRank() { cudaStreamDestroy(stream); }
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  // As the host's plans are: what neither writes is alike in both.
  void poison() {
    for (DeviceBytes* bytes : {&plan, &scratch, &table, &flags}) bytes->fill(cases::PoisonedMemory::kPoison);
  }
  PlanReport read_report() const { return *reinterpret_cast<const PlanReport*>(report.read()->data()); }
  PlanState read_state() const {
    const auto copy = scratch.read();
    Carver carver(copy->data());
    return *carve_plan_scratch(carver, shape).state;
  }
  ControlBlock read_control() const {
    ControlBlock copy;
    std::memcpy(&copy, control.read()->data(), sizeof(copy));
    return copy;
  }

  LayerShape shape;
  TaskChoice choice;
  DeviceBytes plan, scratch, table, flags, control, topk_idx, topk_weights, num_tokens, report;
  cudaStream_t stream = nullptr;
};

constexpr TaskChoice kForwardTasks{
    Direction::kForward, kForwardWork, {{128, 256, 128, 256, 256, 256}, true, {8, 1}, {16, 3}, 2, 1}};
constexpr TaskChoice kBackwardTasks{
    Direction::kBackward, {true, true, true, true}, {{128, 256, 128, 256, 256, 128}, true, {8, 1}, {16, 3}, 2, 1}};
constexpr TaskChoice kRecomputingTasks{Direction::kBackward,
                                       {true, true, true, true, Recompute::kInSeveralPasses},
                                       {{128, 256, 128, 256, 256, 128}, true, {8, 1}, {16, 3}, 2, 1}};

void launch_one(const PlanLaunch& launch, int32_t num_sms, cudaStream_t stream) {
  launch_plan({&launch, 1}, num_sms, stream);
}

class DeviceGroup {
 public:
  DeviceGroup(const std::vector<LayerShape>& shapes, const TaskChoice& choice) {
    for (const LayerShape& shape : shapes) ranks_.push_back(std::make_unique<DeviceRank>(shape, choice));
  }
  static DeviceGroup of(const cases::Routing& routing, const TaskChoice& choice) {
    std::vector<LayerShape> shapes;
    for (int32_t rank = 0; rank < routing.ep_size(); ++rank) shapes.push_back(routing.shape(rank, 384, 256));
    return DeviceGroup(shapes, choice);
  }

  int32_t size() const { return static_cast<int32_t>(ranks_.size()); }
  DeviceRank& operator[](int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  void bring(const cases::Routing& routing) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank]->topk_idx.write(routing.topk_idx[rank].data(), routing.topk_idx[rank].size());
      ranks_[rank]->topk_weights.write(routing.topk_weights[rank].data(), routing.topk_weights[rank].size());
      ranks_[rank]->num_tokens.write(&routing.num_tokens[rank], 1);
    }
  }

  PlanLaunch arguments(int32_t rank) {
    DeviceRank& own = (*this)[rank];
    PlanLaunch launch{};
    Carver plan_carver(own.plan.data());
    Carver scratch_carver(own.scratch.data());
    Carver table_carver(own.table.data());
    Carver flag_carver(own.flags.data());
    launch.plan = carve_plan(plan_carver, own.shape);
    launch.scratch = carve_plan_scratch(scratch_carver, own.shape);
    launch.table = carve_task_table(table_carver, own.shape, own.choice);
    launch.choice = own.choice;
    launch.flags = carve_local_flags(flag_carver, own.shape);
    for (int32_t peer = 0; peer < size(); ++peer) {
      launch.controls[peer] = (*this)[peer].control.as<ControlBlock>();
      launch.topk_idx[peer] = (*this)[peer].topk_idx.as<int32_t>();
      launch.topk_weights[peer] = (*this)[peer].topk_weights.as<float>();
      launch.num_tokens[peer] = (*this)[peer].num_tokens.as<int64_t>();
    }
    launch.report = own.report.as<PlanReport>();
    launch.call = {own.choice.direction == Direction::kForward ? CallKind::kForward : CallKind::kBackward, 0x5EED};
    launch.deadline_s = 20;
    return launch;
  }

  // All ranks in one launch, each with its share of the SMs.
  void launch_all(int32_t num_sms) {
    std::vector<PlanLaunch> launches;
    for (int32_t rank = 0; rank < size(); ++rank) launches.push_back(arguments(rank));
    launch_plan(launches, num_sms, (*this)[0].stream);
    must(cudaDeviceSynchronize(), "the plan kernel");
  }

 private:
  std::vector<std::unique_ptr<DeviceRank>> ranks_;
};

template <class T>
bool same(const T* a, const T* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(T)) == 0;
}

// Both lay in memory that was poisoned before: also what nobody writes must be alike. `cursor` is scratch of the
// host's.
std::string difference(const Plan& host, const Plan& device) {
  const LayerShape& shape = host.shape;
  const int64_t table = int64_t{shape.ep_size} * shape.num_experts;
  const int32_t num_local = shape.num_local_experts();
  std::string names;
  const auto compare = [&](const char* name, const auto* a, const auto* b, int64_t count) {
    if (same(a, b, count)) return;
    int64_t first = 0;
    while (same(a + first, b + first, 1)) ++first;
    names += words(" ", name, "[", first, "]");
  };
  compare("num_passes", host.num_passes, device.num_passes, 1);
  compare("route_counts", host.route_counts, device.route_counts, table);
  compare("segment_begin", host.segment_begin, device.segment_begin, table);
  compare("expert_rows", host.expert_rows, device.expert_rows, num_local);
  compare("expert_block_begin", host.expert_block_begin, device.expert_block_begin, num_local + 1);
  compare("route_row", host.route_row, device.route_row, shape.max_routes());
  compare("row_route", host.row_route, device.row_route, shape.max_pool_rows());
  compare("row_weight", host.row_weight, device.row_weight, shape.max_pool_rows());
  compare("row_entry", host.row_entry, device.row_entry, shape.max_pool_rows());
  compare("entries", host.entries, device.entries, shape.max_routes());
  compare("fan_rows", host.fan_rows, device.fan_rows, shape.max_routes());
  compare("combine_order", host.combine_order, device.combine_order, shape.max_routes());
  compare("pass_entry_begin", host.pass_entry_begin, device.pass_entry_begin, shape.max_passes() + 1);
  return names;
}

std::string difference(const Plan& host, const TaskTable& table, const TaskChoice& choice) {
  int64_t next = 0;
  for (int32_t pass = 0; pass < *host.num_passes; ++pass) {
    const TaskOrder order = task_order(host, choice, pass, 0);
    if (table.pass_begin[pass] != next) return words(" pass_begin[", pass, "] is ", table.pass_begin[pass]);
    for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket, ++next) {
      const MatrixTask task = order.matrix_task(ticket);
      if (!same(&task, &table.tasks[next], 1)) return words(" task ", ticket, " of pass ", pass);
    }
  }
  const int32_t end = table.pass_begin[*host.num_passes];
  return end == next ? "" : words(" pass_begin[", *host.num_passes, "] is ", end);
}

// Where rows of tokens begin, as tiles gather them; of padding rows nobody asks.
std::string row_begin_difference(const Plan& host, const uint32_t* row_begin) {
  const LayerShape& shape = host.shape;
  for (int32_t row = 0; row < host.num_blocks() * kBlockRows; ++row) {
    const RouteRef route = host.row_route[row];
    const int64_t expected = (route.source * shape.max_tokens + route.token) * (shape.hidden / 8);
    if (route.token != kPaddingToken && row_begin[row] != expected) return words(" row_begin[", row, "]");
  }
  return "";
}

// Empty if everything that the rank's launch made is what the host makes of the routing.
std::string difference(const cases::Routing& routing, const DeviceRank& rank, uint32_t epoch) {
  const cases::RankPlan host(routing, rank.shape.ep_rank, rank.shape.hidden, rank.shape.intermediate);
  const auto plan_copy = rank.plan.read();
  const auto table_copy = rank.table.read();
  const auto flag_copy = rank.flags.read();
  const auto scratch_copy = rank.scratch.read();
  Carver plan_carver(plan_copy->data());
  Carver table_carver(table_copy->data());
  Carver flag_carver(flag_copy->data());
  Carver scratch_carver(scratch_copy->data());
  std::string names = difference(*host, carve_plan(plan_carver, rank.shape));
  names += difference(*host, carve_task_table(table_carver, rank.shape, rank.choice), rank.choice);
  names += row_begin_difference(*host, carve_plan_scratch(scratch_carver, rank.shape).row_begin);

  const LocalFlags flags = carve_local_flags(flag_carver, rank.shape);
  const uint32_t* end = flags.words + kNumBanks * flags.words_per_bank + 1;
  if (std::any_of(static_cast<const uint32_t*>(flags.words), end, [](uint32_t word) { return word != 0; })) {
    names += " flags";
  }
  const PlanState state = rank.read_state();
  const ControlBlock control = rank.read_control();
  const auto own_tokens = static_cast<int32_t>(routing.num_tokens[static_cast<size_t>(rank.shape.ep_rank)]);
  if (state.ready != 1 || state.epoch != epoch || state.num_own_tokens != own_tokens) names += " state";
  if (control.epoch != epoch + static_cast<uint32_t>(*host->num_passes) - 1) names += " epoch";
  return names;
}

void check_group(DeviceGroup& group, const cases::Routing& routing, uint32_t epoch, const std::string& what) {
  for (int32_t rank = 0; rank < group.size(); ++rank) {
    const std::string names = difference(routing, group[rank], epoch);
    check(names.empty(), words(what, ", rank ", rank, ": device and host differ in", names));
    const PlanFault fault = group[rank].read_report().fault;
    check(fault == PlanFault::kNone, words(what, ", rank ", rank, ": reports fault ", static_cast<int>(fault)));
  }
}

// Every routing in both directions, with one CTA a rank, a few, and as many as there is room for at once.
void test_routings(const std::vector<cases::NamedRouting>& routings, int32_t total_sms) {
  for (const cases::NamedRouting& named : routings) {
    const cases::Routing routing = named.make();
    for (const TaskChoice& choice : {kForwardTasks, kBackwardTasks, kRecomputingTasks}) {
      DeviceGroup group = DeviceGroup::of(routing, choice);
      const bool forward = choice.direction == Direction::kForward;
      uint32_t epoch = 1;
      for (const int32_t num_sms : {max_of(1, total_sms / group.size()), min_of(3, total_sms / group.size()), 1}) {
        if (num_sms < 1) continue;
        group.bring(routing);
        for (int32_t rank = 0; rank < group.size(); ++rank) group[rank].poison();
        group.launch_all(num_sms);
        check_group(group, routing, epoch,
                    words(named.name, forward ? ", forward" : ", backward", ", num_sms ", num_sms));
        epoch = group[0].read_control().epoch + 1;
      }
    }
  }
}

// One captured launch a rank, replayed with other tokens, other routes and other numbers of passes.
void test_graph_replay(int32_t total_sms) {
  const cases::RoutingSizes sizes{24, 3, {400, 90}, 6};
  const cases::Routing first = cases::uniform_routing(sizes, 1, 0.1);
  DeviceGroup group = DeviceGroup::of(first, kForwardTasks);
  std::vector<cudaGraphExec_t> graphs;
  for (int32_t rank = 0; rank < group.size(); ++rank) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    must(cudaStreamBeginCapture(group[rank].stream, cudaStreamCaptureModeThreadLocal), "begin of capture");
    launch_one(group.arguments(rank), total_sms / 2, group[rank].stream);
    must(cudaStreamEndCapture(group[rank].stream, &graph), "end of capture");
    must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    graphs.push_back(exec);
  }
  uint32_t epoch = 1;
  for (uint32_t replay = 0; replay < 5; ++replay) {
    cases::RoutingSizes changed = sizes;
    changed.num_tokens = {400 - 97 * replay, 22 * replay};
    cases::Routing routing = cases::uniform_routing(changed, replay, 0.1 * replay);
    if (replay == 3) routing = cases::skewed_routing(changed, 12, 3);
    for (int32_t rank = 0; rank < group.size(); ++rank) group[rank].poison();
    group.bring(routing);
    for (int32_t rank = 0; rank < group.size(); ++rank) {
      must(cudaGraphLaunch(graphs[static_cast<size_t>(rank)], group[rank].stream), "cudaGraphLaunch");
    }
    must(cudaDeviceSynchronize(), "the replayed plan kernels");
    // The shape of the group, not of this routing, is what the device was told.
    routing.num_tokens = changed.num_tokens;
    for (int32_t rank = 0; rank < group.size(); ++rank) {
      const auto copy = group[rank].plan.read();
      Carver carver(copy->data());
      cases::PoisonedMemory memory(static_cast<int64_t>(copy->size()));
      Carver host_carver(memory.data());
      const Plan host = carve_plan(host_carver, group[rank].shape);
      build_plan(host, cases::inputs_of(routing));
      const std::string names = difference(host, carve_plan(carver, group[rank].shape));
      check(names.empty(), words("replay ", replay, ", rank ", rank, ": device and host differ in", names));
      check(group[rank].read_state().epoch == epoch, words("replay ", replay, ", rank ", rank, ": epoch"));
    }
    epoch = group[0].read_control().epoch + 1;
  }
  for (cudaGraphExec_t exec : graphs) must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
}

// Indices out of range count as masked on every rank, and the first in the order of ranks, tokens and slots is named.
void test_bad_indices(int32_t total_sms) {
  cases::Routing routing = cases::uniform_routing({18, 4, {200, 77, 130}}, 5, 0.05);
  DeviceGroup group = DeviceGroup::of(routing, kForwardTasks);
  cases::Routing masked = routing;
  const auto spoil = [&](size_t rank, size_t token, size_t slot, int32_t value) {
    routing.topk_idx[rank][token * 4 + slot] = value;
    masked.topk_idx[rank][token * 4 + slot] = kMaskedRoute;
  };
  spoil(2, 3, 0, -2);
  spoil(1, 76, 3, std::numeric_limits<int32_t>::min());
  spoil(1, 50, 2, 18);
  spoil(2, 129, 1, std::numeric_limits<int32_t>::max());
  group.bring(routing);
  for (int32_t rank = 0; rank < 3; ++rank) group[rank].poison();
  group.launch_all(total_sms / 3);
  for (int32_t rank = 0; rank < 3; ++rank) {
    const std::string names = difference(masked, group[rank], 1);
    check(names.empty(), words("bad indices, rank ", rank, ": device and host differ in", names));
    const PlanReport report = group[rank].read_report();
    check(report.fault == PlanFault::kIndex && report.rank == 1 && report.token == 50 && report.slot == 2 &&
              report.value == 18,
          words("bad indices, rank ", rank, " names rank ", report.rank, ", token ", report.token, ", slot ",
                report.slot, ", value ", report.value));
  }
  // The word stays until the host clears it.
  spoil(0, 0, 0, 99);
  group.bring(routing);
  group.launch_all(total_sms / 3);
  check(group[0].read_report().token == 50, "a report is not overwritten");
  // But by a stall, which finishes the group.
  PlanLaunch alone = group.arguments(0);
  alone.deadline_s = 0.02;
  launch_one(alone, 4, group[0].stream);
  must(cudaDeviceSynchronize(), "a plan kernel that stalls after a bad index");
  check(group[0].read_report().fault == PlanFault::kStalled, "a stall after a bad index is told");
}

// A call that ends early on all ranks leaves the group usable.
template <class Spoil, class Restore>
void test_early_end(const char* what, PlanFault fault, int64_t value, Spoil spoil, Restore restore, int32_t total_sms) {
  const cases::Routing routing = cases::uniform_routing({9, 2, {60, 70, 80}}, 6);
  DeviceGroup group = DeviceGroup::of(routing, kForwardTasks);
  group.bring(routing);
  spoil(group);
  for (int32_t rank = 0; rank < 3; ++rank) {
    PlanLaunch launch = group.arguments(rank);
    if (fault == PlanFault::kDisagreement && rank == 1) launch.call.fingerprint ^= 1;
    launch_one(launch, total_sms / 3, group[rank].stream);
  }
  must(cudaDeviceSynchronize(), what);
  for (int32_t rank = 0; rank < 3; ++rank) {
    const PlanReport report = group[rank].read_report();
    const int32_t named = fault == PlanFault::kDisagreement && rank == 1 ? 0 : 1;
    check(report.fault == fault && report.rank == named, words(what, ": report of rank ", rank));
    check(report.own_call.kind == CallKind::kForward, words(what, ": what rank ", rank, " had come for"));
    if (rank != 1) check(report.value == value, words(what, ": value reported by rank ", rank));
    check(group[rank].read_state().ready == 0, words(what, ": rank ", rank, " is not ready"));
    group[rank].report.fill(0);
  }
  restore(group);
  for (int32_t rank = 0; rank < 3; ++rank) group[rank].poison();
  group.launch_all(total_sms / 3);
  check_group(group, routing, 2, words("after ", what));
}

// Rank 1 stays away: rank 0 ends with a report that names it, and when rank 1 comes it learns that it is too late.
void test_stall() {
  const cases::Routing routing = cases::uniform_routing({8, 2, {60, 70}}, 7);
  DeviceGroup group = DeviceGroup::of(routing, kForwardTasks);
  group.bring(routing);
  PlanLaunch launch = group.arguments(0);
  launch.deadline_s = 0.02;
  launch_one(launch, 4, group[0].stream);
  must(cudaDeviceSynchronize(), "a plan kernel that stalls");
  const PlanReport waited = group[0].read_report();
  const std::string text = describe(waited.stall, 0, launch.deadline_s);
  const char* expected =
      "rank 0 stalled in forward: flag entry, written by rank 1, should be 1 and is 0 after the deadline of 0.02 s; "
      "the group is finished: find out why that rank is missing, then make a new group";
  check(waited.fault == PlanFault::kStalled && text == expected, words("stall: the report reads: ", text));
  check(group[0].read_state().ready == 0, "stall: rank 0 is not ready");
  for (int32_t rank = 0; rank < 2; ++rank) {
    check(group[rank].read_control().abort == encode_abort(0, 1), words("stall: the abort word of rank ", rank));
  }

  launch = group.arguments(1);
  launch_one(launch, 4, group[1].stream);
  must(cudaDeviceSynchronize(), "a plan kernel that comes too late");
  const PlanReport late = group[1].read_report();
  check(late.fault == PlanFault::kStalled && late.stall.aborted_by == 0 && late.stall.blamed == 1,
        "stall: the late rank names who gave up, and on whom");
  check(group[1].read_state().ready == 0, "stall: the late rank is not ready");
}

void test_too_many_experts() {
  cases::Routing routing = cases::uniform_routing({8, 2, {6}}, 8);
  DeviceGroup group = DeviceGroup::of(routing, kForwardTasks);
  PlanLaunch launch = group.arguments(0);
  launch.plan.shape.num_experts = 100000;
  std::string text;
  try {
    launch_one(launch, 1, group[0].stream);
  } catch (const Error& error) {
    text = error.what();
  }
  check(text.rfind("num_experts is 100000, whose counts need ", 0) == 0, words("too many experts: ", text));
}

// ---- timings
// ---------------------------------------------------------------------------------------------------------

__global__ void empty_kernel(int) {}

// Lets one rank run alone: its peers have arrived at its next call.
__global__ void arrive_for_peers(ControlBlock* control, int32_t num_ranks, Call call) {
  const uint32_t epoch = control->epoch + 1;
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer < num_ranks) control->entry[epoch % kNumBanks][peer] = uint64_t{epoch} << 32 | encode_call(call);
}

// Of one launch, or of each of several in a row.
template <class Before, class Launch>
double median_us(cudaStream_t stream, int launches, Before before, Launch launch) {
  constexpr int kRuns = 20;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  must(cudaEventCreate(&begin), "cudaEventCreate");
  must(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int run = -3; run < kRuns; ++run) {
    before();
    must(cudaEventRecord(begin, stream), "cudaEventRecord");
    for (int n = 0; n < launches; ++n) launch();
    must(cudaEventRecord(end, stream), "cudaEventRecord");
    must(cudaStreamSynchronize(stream), "the timed kernel");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (run >= 0) times.push_back(ms * 1000 / static_cast<float>(launches));
  }
  must(cudaEventDestroy(begin), "cudaEventDestroy");
  must(cudaEventDestroy(end), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  return (times[kRuns / 2 - 1] + times[kRuns / 2]) / 2;
}

// One rank of `ep_size` with the whole device or `num_sms` of it, its peers' inputs in local memory.
double time_plan(int32_t ep_size, int32_t num_experts, int32_t top_k, int64_t tokens, int32_t num_sms,
                 int launches = 1) {
  const cases::RoutingSizes sizes{num_experts, top_k, std::vector<int64_t>(static_cast<size_t>(ep_size), tokens),
                                  static_cast<int32_t>(tokens * top_k * 5 / 4 / kBlockRows) + num_experts / ep_size};
  const cases::Routing routing = cases::uniform_routing(sizes, 9);
  std::vector<LayerShape> shapes;
  for (int32_t rank = 0; rank < ep_size; ++rank) shapes.push_back(routing.shape(rank, 2048, 768));
  DeviceGroup group(shapes, kForwardTasks);
  group.bring(routing);
  const int32_t rank = ep_size - 1;
  group[rank].poison();
  const PlanLaunch launch = group.arguments(rank);
  cudaStream_t stream = group[rank].stream;
  const double us = median_us(
      stream, launches,
      [&] {
        ControlBlock* control = launch.controls[rank];
        int32_t ranks = ep_size;
        Call call = launch.call;
        void* arguments[] = {&control, &ranks, &call};
        must(cudaLaunchKernel(arrive_for_peers, dim3(1), dim3(64), arguments, 0, stream), "arrive_for_peers");
      },
      [&] { launch_one(launch, num_sms, stream); });
  const std::string names = difference(routing, group[rank], group[rank].read_state().epoch);
  check(names.empty(), words("timed plan of ", ep_size, " ranks: device and host differ in", names));
  return us;
}

void print_timings() {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const double empty = median_us(
      stream, 1, [] {},
      [&] {
        int zero = 0;
        void* arguments[] = {&zero};
        must(cudaLaunchKernel(empty_kernel, dim3(1), dim3(32), arguments, 0, stream), "empty_kernel");
      });
  must(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::printf("an empty kernel between the same events: %.1f us\n", empty);
  std::printf("%5s %8s %6s %7s %8s %9s\n", "ranks", "experts", "top-k", "tokens", "num_sms", "us");
  const auto row = [](int32_t ep_size, int32_t experts, int32_t top_k, int64_t tokens, int32_t num_sms) {
    const double us = time_plan(ep_size, experts, top_k, tokens, num_sms);
    std::printf("%5d %8d %6d %7lld %8d %9.1f\n", ep_size, experts, top_k, static_cast<long long>(tokens), num_sms, us);
  };
  row(1, 128, 8, 16384, 0);
  row(2, 128, 8, 16384, 0);
  row(4, 128, 8, 16384, 0);
  row(8, 128, 8, 16384, 0);
  row(1, 128, 8, 4096, 0);
  row(1, 512, 16, 16384, 0);
  row(8, 512, 16, 16384, 0);
  row(1, 128, 8, 16384, 66);
  row(2, 128, 8, 16384, 66);
  row(8, 128, 8, 16384, 16);
  std::printf("the first row, 20 launches in a row: %.1f us each\n", time_plan(1, 128, 8, 16384, 0, 20));
}

int run(int argc, char** argv) {
  constexpr int kSkipped = 77;  // as CTest is told
  int device = 0;
  int total_sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    std::printf("skipped: no CUDA device\n");
    return kSkipped;
  }
  must(cudaDeviceGetAttribute(&total_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  // Ranks that wait for one another must all be resident: at most as many CTAs as SMs, and at most one rank a CTA.
  std::vector<cases::NamedRouting> routings = cases::adversarial_routings();
  for (cases::NamedRouting& named : cases::random_routings(40)) routings.push_back(std::move(named));
  std::erase_if(routings, [](const cases::NamedRouting& named) { return named.make().ep_size() > kMaxCudaRanks; });
  routings.push_back({"more_blocks_than_a_cta_counts", [] {
                        return cases::uniform_routing({4, 2, {133000}, 700}, 10);
                      }});
  test_routings(routings, total_sms);
  test_graph_replay(total_sms);
  test_bad_indices(total_sms);
  test_early_end(
      "ranks that disagree", PlanFault::kDisagreement, encode_call({CallKind::kForward, 0x5EED ^ 1}),
      [](DeviceGroup&) {}, [](DeviceGroup&) {}, total_sms);
  int64_t too_many = 81;
  int64_t enough = 70;
  test_early_end(
      "too many tokens", PlanFault::kNumTokens, too_many,
      [&](DeviceGroup& group) { group[1].num_tokens.write(&too_many, 1); },
      [&](DeviceGroup& group) { group[1].num_tokens.write(&enough, 1); }, total_sms);
  test_stall();
  test_too_many_experts();
  if (argc > 1 && std::string_view(argv[1]) == "--time") print_timings();
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  try {
    return weft::run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n%d passed, %d failed\n", error.what(), weft::num_passed, weft::num_failed + 1);
    return 1;
  }
}
