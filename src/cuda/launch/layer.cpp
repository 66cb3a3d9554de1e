#include "cuda/launch/layer.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "cuda/launch/backward.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/launch/plan.hpp"
#include "cuda/launch/tensor_map.hpp"
#include "protocol/rank_barrier.hpp"
#include "protocol/stall.hpp"
#include "symmetric/cuda_device.hpp"

namespace weft {
namespace {

void check(cudaError_t status, const char* what) {
  require(status == cudaSuccess, status == cudaErrorMemoryAllocation ? WEFT_OUT_OF_MEMORY : WEFT_INTERNAL, what, ": ",
          cudaGetErrorString(status));
}

struct DeviceDeleter {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct PinnedDeleter {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
struct EventDeleter {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, EventDeleter>;

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cannot make a CUDA event");
  return Event(event);
}

// One that waits for no other: the default stream may hold a kernel that waits for this rank.
cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cannot make a CUDA stream");
  return stream;
}

// Into device memory, in no stream of the caller's, and by a copy: kernels that wait may leave no SM to another.
template <class Value>
void write(Value* target, const Value& value) {
  const cudaStream_t stream = make_stream();
  const cudaError_t sent = cudaMemcpyAsync(target, &value, sizeof(Value), cudaMemcpyHostToDevice, stream);
  const cudaError_t done = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check(sent, "cannot write to the device");
  check(done, "cannot write to the device");
}

// Where the kernels of a rank run that shares its process with others; on the current device. One a device and rank for
// all layers, and those of all ranks made one after another: streams share a few queues of the driver, in which kernels
// of two ranks must not be one behind the other.
cudaStream_t branch_stream(int device, const LayerShape& shape) {
  static std::mutex& mutex = *new std::mutex;  // never destroyed, as the driver may be gone when the process ends
  static auto& streams = *new std::map<int, std::vector<cudaStream_t>>;
  const std::lock_guard lock(mutex);
  std::vector<cudaStream_t>& of_device = streams[device];
  while (of_device.size() < static_cast<size_t>(shape.ep_size)) of_device.push_back(make_stream());
  return of_device[static_cast<size_t>(shape.ep_rank)];
}

constexpr TaskChoice kForwardChoice{Direction::kForward, kForwardWork, kHopperTiling};
constexpr TaskChoice kRecomputeChoice{Direction::kForward, kRecomputeWork, kHopperTiling};
constexpr TaskChoice backward_choice(const Work& work) { return {Direction::kBackward, work, kHopperTiling}; }
constexpr Work kWholeBackward{true, true, true, true};

// Parts of a row's router gradient: one a down_dgrad tile.
int32_t num_dw_tiles(const LayerShape& shape) {
  constexpr int32_t kCols = kHopperTiling.cols[static_cast<int32_t>(TaskKind::kDownDgrad)];
  return ceil_div(static_cast<int32_t>(shape.intermediate), kCols);
}

// The caller's scratch on the device. No backward writes to what a second one of the same forward reads: x and z.
struct Workspace {
  LocalFlags flags;
  Plan plan;
  PlanScratch scratch;
  TaskTable forward_table;
  Bf16* x;           // [capacity, H]
  Bf16* act;         // [capacity, I] a' = w silu(g) u
  Bf16* rows;        // [capacity, H] o in forward, dx rows in backward
  float* token_sum;  // [max_tokens, H] sums of own tokens, between passes

  // Of a backward only, and so behind all that a forward needs.
  TaskTable backward_table;
  Bf16* dy;           // [capacity, H]
  Bf16* dz;           // [capacity, 2, I]
  float* dw_partial;  // [capacity, num_dw_tiles]
  Bf16* z;            // [capacity, 2, I] recomputed, where the caller keeps none
};

Workspace carve_workspace(Carver& carver, const LayerShape& shape, weft_save save, Direction direction) {
  const int64_t rows = shape.capacity_rows();
  Workspace workspace{};
  workspace.flags = carve_local_flags(carver, shape);
  workspace.plan = carve_plan(carver, shape);
  workspace.scratch = carve_plan_scratch(carver, shape);
  workspace.forward_table = carve_task_table(carver, shape, kForwardChoice);
  workspace.x = carver.take<Bf16>(rows * shape.hidden);
  workspace.act = carver.take<Bf16>(rows * shape.intermediate);
  workspace.rows = carver.take<Bf16>(rows * shape.hidden);
  if (shape.max_passes() > 1) workspace.token_sum = carver.take<float>(shape.max_tokens * shape.hidden);
  if (direction == Direction::kForward) return workspace;
  workspace.backward_table = carve_task_table(carver, shape, backward_choice(kWholeBackward));
  workspace.dy = carver.take<Bf16>(rows * shape.hidden);
  workspace.dz = carver.take<Bf16>(rows * 2 * shape.intermediate);
  workspace.dw_partial = carver.take<float>(rows * num_dw_tiles(shape));
  if (save == WEFT_SAVE_INPUTS) workspace.z = carver.take<Bf16>(rows * 2 * shape.intermediate);
  return workspace;
}

// Which forward's rows lie in the workspaces of this process, whichever layer wrote there last. On the host and in the
// order in which calls are launched: reading a tag from the device would wait for it, and uninitialised memory may hold
// any tag. Replays of a graph are not seen: who hands a generation to a backward keeps workspaces of captured calls
// apart.
class WorkspaceRecords {
 public:
  void forget(const void* workspace, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(workspace);
    const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
    const std::lock_guard lock(mutex_);
    std::erase_if(records_, [&](const Record& record) { return record.begin < end && begin < record.end; });
  }
  void keep(const void* workspace, int64_t bytes, uint64_t generation) {
    forget(workspace, bytes);
    const auto begin = reinterpret_cast<uintptr_t>(workspace);
    const std::lock_guard lock(mutex_);
    records_.push_back({begin, begin + static_cast<uintptr_t>(bytes), generation});
  }
  bool holds(const void* workspace, uint64_t generation) {
    const std::lock_guard lock(mutex_);
    return std::any_of(records_.begin(), records_.end(), [&](const Record& record) {
      return record.begin == reinterpret_cast<uintptr_t>(workspace) && record.generation == generation;
    });
  }

 private:
  struct Record {
    uintptr_t begin;
    uintptr_t end;
    uint64_t generation;
  };
  std::mutex mutex_;
  std::vector<Record> records_;
};

WorkspaceRecords& workspace_records() {
  static WorkspaceRecords& records = *new WorkspaceRecords;  // never destroyed, as calls may end with the process
  return records;
}

// Expert weights or their gradients, together or gate and up apart.
template <class Byte>
struct GateUp {
  Byte* gate;
  Byte* up;
  int64_t expert_stride;  // elements
};
template <class Byte, class Void>
GateUp<Byte> gate_up_of(const LayerShape& shape, Void* together, Void* gate, Void* up, int64_t element_bytes) {
  const int64_t weight = shape.intermediate * shape.hidden;
  if (together == nullptr) return {static_cast<Byte*>(gate), static_cast<Byte*>(up), weight};
  auto* first = static_cast<Byte*>(together);
  return {first, first + weight * element_bytes, 2 * weight};
}

void require_aligned(std::initializer_list<std::pair<const void*, const char*>> arguments) {
  for (const auto& [pointer, name] : arguments) {
    require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, WEFT_INVALID_ARGUMENT, name,
            " must be aligned to 16 bytes; its address ends in ", reinterpret_cast<uintptr_t>(pointer) % 16);
  }
}

// Where the kernels find what each rank brings and is brought: in its symmetric memory, as mapped here. A single rank's
// inputs are where its caller has them, and nobody brings it rows.
struct Peers {
  ControlBlock* controls[kMaxRanks];
  const int64_t* num_tokens[kMaxRanks];
  const int32_t* topk_idx[kMaxRanks];
  const float* topk_weights[kMaxRanks];
  const Bf16* x[kMaxRanks];
  const Bf16* dy[kMaxRanks];
  Bf16* partial[kMaxRanks];
  float* dtopk_weights[kMaxRanks];
  uint32_t* arrived[kMaxRanks];
};

// What a layer keeps on the device between calls.
struct DeviceState {
  ControlBlock control;  // of a single rank; otherwise the group's is used
  PlanReport report;
  int64_t num_tokens;
};

class CudaLayer final : public BackendLayer {
 public:
  explicit CudaLayer(const CudaOptions& options) : options_(options), device_(current_cuda_device()) {
    check(cudaDeviceGetAttribute(&device_sms_, cudaDevAttrMultiProcessorCount, device_), "cannot ask the CUDA device");
  }
  ~CudaLayer() override {
    // Freeing waits for the device, and may keep a peer of this process from launching what it waits for.
    if (branch_ != nullptr) cudaStreamSynchronize(branch_);
  }

  int64_t workspace_bytes() const override {
    Carver carver;
    carve_workspace(carver, options_.shape, options_.save, Direction::kBackward);
    return carver.used();
  }
  int64_t forward_workspace_bytes() const override {
    Carver carver;
    carve_workspace(carver, options_.shape, options_.save, Direction::kForward);
    return carver.used();
  }
  int64_t saved_bytes() const override {
    return options_.shape.capacity_rows() * 2 * options_.shape.intermediate * static_cast<int64_t>(sizeof(Bf16));
  }
  int64_t symmetric_data_bytes() const override {
    if (is_alone()) return 0;
    Carver carver;
    carve_symmetric_data<Bf16>(carver, options_.shape);
    return carver.used();
  }
  int64_t symmetric_flag_bytes() const override {
    if (is_alone()) return 0;
    Carver carver;
    carve_symmetric_flags(carver, options_.shape);
    return carver.used();
  }
  MemoryKind memory_kind() const override { return MemoryKind::kDevice; }

  void check_forward(const weft_forward_args& args) override {
    const weft_inputs& inputs = *args.inputs;
    require_aligned({{inputs.x, "x"},
                     {args.y, "y"},
                     {inputs.gate_up, "gate_up"},
                     {inputs.gate, "gate"},
                     {inputs.up, "up"},
                     {inputs.down, "down"},
                     {args.saved, "saved"}});
  }
  void check_backward(const weft_backward_args& args) override {
    const weft_inputs& inputs = *args.inputs;
    require_aligned({{inputs.x, "x"},
                     {args.dy, "dy"},
                     {inputs.gate_up, "gate_up"},
                     {inputs.gate, "gate"},
                     {inputs.up, "up"},
                     {inputs.down, "down"},
                     {args.saved, "saved"},
                     {args.dx, "dx"},
                     {args.dgate_up, "dgate_up"},
                     {args.dgate, "dgate"},
                     {args.dup, "dup"},
                     {args.ddown, "ddown"}});
  }

  // A single rank's kernels read the caller's own indices and rows. Otherwise what the peers read is copied in the
  // order of the caller's stream, whose earlier calls have drained: nobody reads any more what they staged.
  void stage(const RankMemory& memory, const weft_inputs& inputs, const void* dy, void* caller_stream) override {
    const CurrentDevice current(device_);
    const auto stream = static_cast<cudaStream_t>(caller_stream);
    if (is_alone()) return launch_stage_tokens(&state_->num_tokens, inputs.num_tokens, stream);
    check_share(memory);
    const LayerShape& shape = options_.shape;
    Carver carver(memory.data[shape.ep_rank]);
    const auto own = carve_symmetric_data<Bf16>(carver, shape);
    const auto copy = [&](void* target, const void* source, int64_t count, size_t element_bytes) {
      check(
          cudaMemcpyAsync(target, source, static_cast<size_t>(count) * element_bytes, cudaMemcpyDeviceToDevice, stream),
          "cannot stage the inputs");
    };
    launch_stage_tokens(own.num_tokens, inputs.num_tokens, stream);
    if (inputs.num_tokens > 0) {
      copy(own.topk_idx, inputs.topk_idx, inputs.num_tokens * shape.top_k, sizeof(int32_t));
      copy(own.topk_weights, inputs.topk_weights, inputs.num_tokens * shape.top_k, sizeof(float));
      copy(own.x, inputs.x, inputs.num_tokens * shape.hidden, sizeof(Bf16));
      if (dy != nullptr) copy(own.dy, dy, inputs.num_tokens * shape.hidden, sizeof(Bf16));
    }
    if (memory.ranks_share_process) check(cudaEventRecord(staged_.get(), stream), "cannot record a CUDA event");
  }

  int32_t forward(const RankMemory& memory, uint32_t, weft_forward_args& args) override {
    const CurrentDevice current(device_);
    workspace_records().forget(args.workspace, workspace_bytes());
    or_give_up(memory, [&] { launch(memory, args); });
    args.generation = 0;
    if (args.saved != nullptr) {  // without z a backward would have to compute again all the same
      args.generation = next_generation();
      workspace_records().keep(args.workspace, workspace_bytes(), args.generation);
    }
    return 1;
  }

  int32_t backward(const RankMemory& memory, uint32_t, weft_backward_args& args) override {
    const CurrentDevice current(device_);
    const bool in_place = args.saved != nullptr && workspace_records().holds(args.workspace, args.generation);
    args.source = in_place ? WEFT_SOURCE_WORKSPACE : args.saved != nullptr ? WEFT_SOURCE_SAVED : WEFT_SOURCE_RECOMPUTED;
    if (!in_place) workspace_records().forget(args.workspace, workspace_bytes());
    or_give_up(memory, [&] { launch(memory, args); });
    return 1;
  }

  void prepare(uint32_t fingerprint) override {
    const CurrentDevice current(device_);
    fingerprint_ = fingerprint;
    void* device = nullptr;
    check(cudaMalloc(&device, sizeof(DeviceState)), "cannot allocate the layer's device state");
    state_.reset(static_cast<DeviceState*>(device));
    write(state_.get(), DeviceState{});
    void* pinned = nullptr;
    check(cudaHostAlloc(&pinned, sizeof(PlanReport), cudaHostAllocMapped), "cannot allocate pinned host memory");
    host_report_.reset(static_cast<PlanReport*>(pinned));
    *host_report_ = PlanReport{};
    if (is_alone()) return;
    branch_ = branch_stream(device_, options_.shape);
    staged_ = make_event();
    done_ = make_event();
    load_plan();
    load_forward();
  }

  void join(void* caller_stream) override {
    const CurrentDevice current(device_);
    check(cudaEventRecord(done_.get(), branch_), "cannot record a CUDA event");
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(caller_stream), done_.get()), "cannot join a stream");
  }

  void check_reported() override {
    const PlanFault fault = static_cast<const volatile PlanReport*>(host_report_.get())->fault;
    if (fault == PlanFault::kNone) return;
    const PlanReport report = *host_report_;
    if (fault == PlanFault::kStalled) {
      throw Error(WEFT_STALLED, describe(report.stall, options_.shape.ep_rank, options_.deadline_s));
    }
    *host_report_ = PlanReport{};
    const CurrentDevice current(device_);
    write(&state_->report, PlanReport{});
    throw Error(WEFT_INVALID_ARGUMENT, "found by the device in an earlier call: " + fault_words(report));
  }

 private:
  bool is_alone() const { return options_.shape.ep_size == 1; }

  std::string fault_words(const PlanReport& report) const {
    switch (report.fault) {
      case PlanFault::kDisagreement: {
        const Call call = decode_call(static_cast<uint32_t>(report.value));
        return words("ranks disagree: rank ", options_.shape.ep_rank, " ran a forward, rank ", report.rank, " ",
                     call.kind == CallKind::kForward    ? "one of another layer"
                     : call.kind == CallKind::kBackward ? "a backward"
                                                        : "something else",
                     "; all ranks of a group must make the same calls in the same order, also those that they replay "
                     "from graphs. Nothing was computed");
      }
      case PlanFault::kNumTokens:
        return words("rank ", report.rank, " brought ", report.value,
                     " tokens; allowed: 0 to max_tokens = ", options_.shape.max_tokens,
                     "; create the layer with a larger max_tokens. Nothing was computed");
      default:
        return words("topk_idx of rank ", report.rank, " at token ", report.token, ", slot ", report.slot, " is ",
                     report.value, "; allowed: 0 to ", options_.shape.num_experts - 1, ", or ", kMaskedRoute,
                     " for a masked route, as which it was taken");
    }
  }

  // Kernels of ranks that share a device must all be resident at once: they wait for one another. Even, since the
  // forward runs in clusters of two.
  int32_t num_sms(const RankMemory& memory) const {
    const int32_t sms =
        options_.num_sms > 0 ? min_of(options_.num_sms, device_sms_) : device_sms_ / memory.ranks_on_device;
    return max_of(2, sms / 2 * 2);
  }
  void check_share(const RankMemory& memory) const {
    const int32_t ranks = memory.ranks_on_device;
    require(ranks * num_sms(memory) <= device_sms_, WEFT_INVALID_ARGUMENT, "num_workers (num_sms) is ",
            options_.num_sms, " and ", ranks, " ranks of the group share device ", device_, " with ", device_sms_,
            " SMs, which cannot run them at once; allowed: up to ", device_sms_ / ranks, ", or 0 for ",
            max_of(2, device_sms_ / ranks / 2 * 2));
  }

  Peers peers_of(const RankMemory& memory, const weft_inputs& inputs, const void* dy = nullptr) const {
    Peers peers{};
    if (is_alone()) {
      peers.controls[0] = &state_->control;
      peers.num_tokens[0] = &state_->num_tokens;
      peers.topk_idx[0] = inputs.topk_idx;
      peers.topk_weights[0] = inputs.topk_weights;
      peers.x[0] = static_cast<const Bf16*>(inputs.x);
      peers.dy[0] = static_cast<const Bf16*>(dy);
      return peers;
    }
    for (int32_t peer = 0; peer < options_.shape.ep_size; ++peer) {
      Carver data_carver(memory.data[peer]);
      Carver flag_carver(memory.flags[peer]);
      const auto data = carve_symmetric_data<Bf16>(data_carver, options_.shape);
      peers.controls[peer] = memory.controls[peer];
      peers.num_tokens[peer] = data.num_tokens;
      peers.topk_idx[peer] = data.topk_idx;
      peers.topk_weights[peer] = data.topk_weights;
      peers.x[peer] = data.x;
      peers.dy[peer] = data.dy;
      peers.partial[peer] = data.partial;
      peers.dtopk_weights[peer] = data.dtopk_weights;
      peers.arrived[peer] = carve_symmetric_flags(flag_carver, options_.shape).arrived;
    }
    return peers;
  }

  // Ranks of one process may be called in one stream, where the first would wait for the second for ever: they run in
  // streams of their own, which leave the caller's behind the staging and join it again when all have launched.
  cudaStream_t stream_of(const RankMemory& memory, void* caller_stream) const {
    if (!memory.ranks_share_process) return static_cast<cudaStream_t>(caller_stream);
    check(cudaStreamWaitEvent(branch_, staged_.get()), "cannot leave the caller's stream");
    return branch_;
  }

  void launch(const RankMemory& memory, const weft_forward_args& args) {
    Carver carver(args.workspace);
    const Workspace workspace = carve_workspace(carver, options_.shape, options_.save, Direction::kForward);
    const Peers peers = peers_of(memory, *args.inputs);
    const ForwardParams params = forward_params(workspace, args, peers, kForwardChoice);
    const cudaStream_t stream = stream_of(memory, args.stream);
    const Call call{CallKind::kForward, fingerprint_};
    launch_plan(plan_launch(workspace, peers, kForwardChoice, call, num_sms(memory)), stream);
    launch_forward(params, args.saved != nullptr, num_sms(memory), stream);
  }

  void launch(const RankMemory& memory, const weft_backward_args& args) {
    Carver carver(args.workspace);
    const Workspace workspace = carve_workspace(carver, options_.shape, options_.save, Direction::kBackward);
    const Peers peers = peers_of(memory, *args.inputs, args.dy);
    const bool wants_dx = args.want_dx != 0;
    const bool wants_dtopk = args.want_dtopk_weights != 0;
    const bool wants_gate_up = args.dgate_up != nullptr || args.dgate != nullptr;
    const Work work{wants_dx || wants_dtopk, wants_dx, args.ddown != nullptr, wants_gate_up};
    const TaskChoice choice = backward_choice(work);
    const BackwardParams params = backward_params(workspace, args, peers, choice);
    const cudaStream_t stream = stream_of(memory, args.stream);
    if (args.source == WEFT_SOURCE_RECOMPUTED) {
      weft_forward_args again{};
      again.inputs = args.inputs;
      again.saved = workspace.z;
      const ForwardParams recompute = forward_params(workspace, again, peers, kRecomputeChoice);
      const Call call{CallKind::kForward, fingerprint_};
      launch_plan(plan_launch(workspace, peers, kRecomputeChoice, call, num_sms(memory)), stream);
      launch_forward(recompute, true, num_sms(memory), stream);
    }
    // Made anew even where the forward's is still there - the same bits - since the tasks are others.
    const uint32_t wants = (wants_dx ? 1U : 0U) | (wants_dtopk ? 2U : 0U);
    const Call call{CallKind::kBackward, fingerprint_ << 2 | wants};
    launch_plan(plan_launch(workspace, peers, choice, call, num_sms(memory)), stream);
    launch_backward(params, num_sms(memory), stream);
  }

  template <class Launch>
  void or_give_up(const RankMemory& memory, Launch launch) const {
    try {
      launch();
    } catch (const Error&) {
      give_up(memory);
      throw;
    }
  }

  // This rank has met its peers and cannot launch: their kernels need not wait until the deadline.
  void give_up(const RankMemory& memory) const {
    if (is_alone()) return;
    for (int32_t peer = 0; peer < options_.shape.ep_size; ++peer) {
      try {
        write(&memory.controls[peer]->abort, encode_abort(options_.shape.ep_rank, -1));
      } catch (const Error&) {
        // Why this rank gives up is the thing to say.
      }
    }
  }

  static const TaskTable& table_of(const Workspace& workspace, const TaskChoice& choice) {
    return choice.direction == Direction::kForward ? workspace.forward_table : workspace.backward_table;
  }

  PlanLaunch plan_launch(const Workspace& workspace, const Peers& peers, const TaskChoice& choice, const Call& call,
                         int32_t num_sms) const {
    PlanLaunch launch{};
    launch.plan = workspace.plan;
    launch.scratch = workspace.scratch;
    launch.table = table_of(workspace, choice);
    launch.choice = choice;
    launch.flags = workspace.flags;
    std::copy_n(peers.controls, kMaxRanks, launch.controls);
    std::copy_n(peers.topk_idx, kMaxRanks, launch.topk_idx);
    std::copy_n(peers.topk_weights, kMaxRanks, launch.topk_weights);
    std::copy_n(peers.num_tokens, kMaxRanks, launch.num_tokens);
    launch.report = &state_->report;
    launch.call = call;
    launch.deadline_s = options_.deadline_s;
    launch.num_sms = num_sms;
    return launch;
  }

  // What both directions have in common; `pulls`, `rows` and where router gradients go are the direction's own.
  void fill(PersistentParams& params, const Workspace& workspace, const Peers& peers, const TaskChoice& choice) const {
    params.plan = workspace.plan;
    params.flags = workspace.flags;
    params.table = table_of(workspace, choice);
    params.state = workspace.scratch.state;
    params.topk_idx = workspace.scratch.topk_idx;
    params.token_sum = workspace.token_sum;
    params.combine = choice.work.combine;
    std::copy_n(peers.partial, kMaxRanks, params.partial);
    std::copy_n(peers.arrived, kMaxRanks, params.arrived);
    std::copy_n(peers.controls, kMaxRanks, params.controls);
    params.report = &state_->report;
    params.host_report = host_report_.get();
    params.deadline_ns = static_cast<uint64_t>(options_.deadline_s * 1e9);
  }
  static void add_pull(PersistentParams& params, const Bf16* const (&source)[kMaxRanks], Bf16* pool) {
    RowPull& pull = params.pulls[params.num_pulls++];
    std::copy_n(source, kMaxRanks, pull.source);
    pull.pool = pool;
  }

  // A pool in the workspace: [capacity, cols], or [capacity, parts, cols] as (cols, parts, capacity).
  CUtensorMap pool_map(const Bf16* base, int64_t cols, int32_t box_rows) const {
    const int64_t rows = options_.shape.capacity_rows();
    return make_tensor_map({base, {cols, rows, 1}, {cols, rows * cols}, {box_rows, 1}}, "workspace");
  }
  CUtensorMap pool_map_in_parts(const void* base, int64_t cols, int64_t parts, int32_t box_rows) const {
    const int64_t rows = options_.shape.capacity_rows();
    return make_tensor_map({base, {cols, parts, rows}, {cols, parts * cols}, {1, box_rows}}, "z");
  }
  // Expert weights [e, rows, cols] or their gradients.
  CUtensorMap weight_map(const void* base, int64_t rows, int64_t cols, int64_t expert_stride, int32_t box_rows,
                         const char* name, weft_dtype dtype = WEFT_DTYPE_BF16) const {
    const int64_t experts = options_.shape.num_local_experts();
    return make_tensor_map({base, {cols, rows, experts}, {cols, expert_stride}, {box_rows, 1}, dtype}, name);
  }

  ForwardParams forward_params(const Workspace& workspace, const weft_forward_args& args, const Peers& peers,
                               const TaskChoice& choice) const {
    const LayerShape& shape = options_.shape;
    const weft_inputs& inputs = *args.inputs;
    const int64_t hidden = shape.hidden;
    const int64_t intermediate = shape.intermediate;
    const auto weights = gate_up_of<const std::byte>(shape, inputs.gate_up, inputs.gate, inputs.up, sizeof(Bf16));

    ForwardParams params{};
    fill(params, workspace, peers, choice);
    params.gate = weight_map(weights.gate, intermediate, hidden, weights.expert_stride, 128, "gate");
    params.up = weight_map(weights.up, intermediate, hidden, weights.expert_stride, 128, "up");
    params.down = weight_map(inputs.down, hidden, intermediate, hidden * intermediate, 128, "down");
    params.x_pool = pool_map(workspace.x, hidden, kBlockRows);
    params.act = pool_map(workspace.act, intermediate, kBlockRows);
    params.act_store = pool_map(workspace.act, intermediate, 16);
    params.rows_store = pool_map(workspace.rows, hidden, 16);
    if (args.saved != nullptr) params.z_store = pool_map_in_parts(args.saved, intermediate, 2, 16);
    add_pull(params, peers.x, workspace.x);
    params.rows = workspace.rows;
    params.result = static_cast<Bf16*>(args.y);
    params.clamp_limit = static_cast<float>(options_.clamp_limit);
    return params;
  }

  BackwardParams backward_params(const Workspace& workspace, const weft_backward_args& args, const Peers& peers,
                                 const TaskChoice& choice) const {
    constexpr int32_t kBoxRows = 64;
    const LayerShape& shape = options_.shape;
    const weft_inputs& inputs = *args.inputs;
    const int64_t hidden = shape.hidden;
    const int64_t intermediate = shape.intermediate;
    const int64_t down_stride = hidden * intermediate;
    const auto weights = gate_up_of<const std::byte>(shape, inputs.gate_up, inputs.gate, inputs.up, sizeof(Bf16));
    const bool in_fp32 = args.grad_dtype == WEFT_DTYPE_FP32;
    const auto grads =
        gate_up_of<std::byte>(shape, args.dgate_up, args.dgate, args.dup, in_fp32 ? sizeof(float) : sizeof(Bf16));

    BackwardParams params{};
    fill(params, workspace, peers, choice);
    params.dy = pool_map_in_parts(workspace.dy, hidden, 1, kBoxRows);
    params.x = pool_map(workspace.x, hidden, kBoxRows);
    const void* z = args.saved != nullptr ? args.saved : workspace.z;
    params.z = pool_map_in_parts(z, intermediate, 2, kBlockRows);
    params.act = pool_map(workspace.act, intermediate, kBoxRows);
    params.dz = pool_map_in_parts(workspace.dz, intermediate, 2, kBoxRows);
    params.gate = weight_map(weights.gate, intermediate, hidden, weights.expert_stride, kBoxRows, "gate");
    params.up = weight_map(weights.up, intermediate, hidden, weights.expert_stride, kBoxRows, "up");
    params.down = weight_map(inputs.down, hidden, intermediate, down_stride, kBoxRows, "down");
    params.act_store = pool_map(workspace.act, intermediate, 16);
    params.dz_store = pool_map_in_parts(workspace.dz, intermediate, 2, 16);
    params.rows_store = pool_map(workspace.rows, hidden, 16);
    if (choice.work.gate_up_wgrad) {
      params.dgate = weight_map(grads.gate, intermediate, hidden, grads.expert_stride, 16, "dgate", args.grad_dtype);
      params.dup = weight_map(grads.up, intermediate, hidden, grads.expert_stride, 16, "dup", args.grad_dtype);
    }
    if (choice.work.down_wgrad) {
      params.ddown = weight_map(args.ddown, hidden, intermediate, down_stride, 16, "ddown", args.grad_dtype);
    }
    add_pull(params, peers.dy, workspace.dy);
    // Where z was computed again, x has been pulled for that.
    if (choice.work.gate_up_wgrad && args.source == WEFT_SOURCE_SAVED) add_pull(params, peers.x, workspace.x);
    params.rows = choice.work.dgrad ? workspace.rows : nullptr;
    params.result = static_cast<Bf16*>(args.dx);
    params.dw_parts = workspace.dw_partial;
    params.num_dw_tiles = num_dw_tiles(shape);
    if (args.want_dtopk_weights != 0) params.dw_partial = workspace.dw_partial;
    params.dtopk_weights = args.dtopk_weights;
    std::copy_n(peers.dtopk_weights, kMaxRanks, params.dtopk_home);
    params.clamp_limit = static_cast<float>(options_.clamp_limit);
    params.grads_in_fp32 = in_fp32;
    params.accumulates = args.accumulate != 0;
    return params;
  }

  CudaOptions options_;
  int device_;
  int device_sms_ = 0;
  std::unique_ptr<DeviceState, DeviceDeleter> state_;
  std::unique_ptr<PlanReport, PinnedDeleter> host_report_;
  uint32_t fingerprint_ = 0;
  cudaStream_t branch_ = nullptr;  // of several ranks; used where they share a process
  Event staged_;                   // this rank's inputs lie in symmetric memory
  Event done_;                     // the kernels in branch_
};

}  // namespace

std::string cuda_unsupported(const CudaOptions& options) {
  int device = 0;
  int major = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return words("no CUDA device: ", cudaGetErrorString(status), "; use device \"cpu\"");
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major != 9) {
    return words("device ", device, " has compute capability ", major, ".x; the CUDA backend runs on Hopper (9.0)");
  }
  if (options.recipe->precision != WEFT_PRECISION_BF16) {
    return words("the CUDA backend runs precision \"bf16\" today, not \"", options.recipe->name,
                 "\"; use device \"cpu\"");
  }
  if (options.shape.ep_size == 1 && options.shape.max_passes() != 1) {
    return words(
        "capacity_rows is ", options.shape.capacity_rows(),
        "; on one rank the CUDA backend works in one pass: ", "leave capacity_rows at 0, which fits any routing");
  }
  return "";
}

std::unique_ptr<BackendLayer> make_cuda_layer(const CudaOptions& options) {
  return std::make_unique<CudaLayer>(options);
}

}  // namespace weft
