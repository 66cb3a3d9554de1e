#include "cuda/launch/layer.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/status.hpp"
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

TaskChoice forward_choice() { return {Direction::kForward, kForwardWork, kHopperTiling}; }

// The caller's scratch on the device.
struct Workspace {
  LocalFlags flags;
  Plan plan;
  PlanScratch scratch;
  TaskTable table;
  Bf16* x;           // [capacity, H]
  Bf16* act;         // [capacity, I] a' = w silu(g) u
  Bf16* rows;        // [capacity, H] o
  float* token_sum;  // [max_tokens, H] of own tokens, between passes; several ranks only
};

Workspace carve_workspace(Carver& carver, const LayerShape& shape) {
  Workspace workspace{};
  workspace.flags = carve_local_flags(carver, shape);
  workspace.plan = carve_plan(carver, shape);
  workspace.scratch = carve_plan_scratch(carver, shape);
  workspace.table = carve_task_table(carver, shape, forward_choice());
  workspace.x = carver.take<Bf16>(shape.capacity_rows() * shape.hidden);
  workspace.act = carver.take<Bf16>(shape.capacity_rows() * shape.intermediate);
  workspace.rows = carver.take<Bf16>(shape.capacity_rows() * shape.hidden);
  workspace.token_sum = carver.take<float>(shape.max_passes() > 1 ? shape.max_tokens * shape.hidden : 0);
  return workspace;
}

// Where the kernels find what each rank brings and is brought: in its symmetric memory, as mapped here. A single rank's
// inputs are where its caller has them, and nobody brings it rows.
struct Peers {
  ControlBlock* controls[kMaxRanks];
  const int64_t* num_tokens[kMaxRanks];
  const int32_t* topk_idx[kMaxRanks];
  const float* topk_weights[kMaxRanks];
  const Bf16* x[kMaxRanks];
  Bf16* partial[kMaxRanks];
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
    carve_workspace(carver, options_.shape);
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
    for (const auto& [pointer, name] : {std::pair<const void*, const char*>{inputs.x, "x"},
                                        {args.y, "y"},
                                        {inputs.gate_up, "gate_up"},
                                        {inputs.gate, "gate"},
                                        {inputs.up, "up"},
                                        {inputs.down, "down"},
                                        {args.saved, "saved"}}) {
      require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, WEFT_INVALID_ARGUMENT, name,
              " must be aligned to 16 bytes; its address ends in ", reinterpret_cast<uintptr_t>(pointer) % 16);
    }
  }

  // A single rank's kernels read the caller's own indices and rows. Otherwise what the peers read is copied in the
  // order of the caller's stream, whose earlier calls have drained: nobody reads any more what they staged.
  void stage(const RankMemory& memory, const weft_inputs& inputs, const void*, void* caller_stream) override {
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
    }
    if (memory.ranks_share_process) check(cudaEventRecord(staged_.get(), stream), "cannot record a CUDA event");
  }

  int32_t forward(const RankMemory& memory, uint32_t, weft_forward_args& args) override {
    const CurrentDevice current(device_);
    try {
      launch(memory, args);
    } catch (const Error&) {
      give_up(memory);
      throw;
    }
    args.generation = 0;  // no backward reads this workspace
    return 1;
  }

  // check_backend_backward lets no caller come here.
  int32_t backward(const RankMemory&, uint32_t, weft_backward_args&) override {
    throw Error(WEFT_INTERNAL, "the CUDA backend has no backward");
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

  Peers peers_of(const RankMemory& memory, const weft_inputs& inputs) const {
    Peers peers{};
    if (is_alone()) {
      peers.controls[0] = &state_->control;
      peers.num_tokens[0] = &state_->num_tokens;
      peers.topk_idx[0] = inputs.topk_idx;
      peers.topk_weights[0] = inputs.topk_weights;
      peers.x[0] = static_cast<const Bf16*>(inputs.x);
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
      peers.partial[peer] = data.partial;
      peers.arrived[peer] = carve_symmetric_flags(flag_carver, options_.shape).arrived;
    }
    return peers;
  }

  void launch(const RankMemory& memory, const weft_forward_args& args) {
    Carver carver(args.workspace);
    const Workspace workspace = carve_workspace(carver, options_.shape);
    const Peers peers = peers_of(memory, *args.inputs);
    const ForwardParams params = forward_params(workspace, args, peers);
    // Ranks of one process may be called in one stream, where the first would wait for the second for ever: they run in
    // streams of their own, which leave the caller's behind the staging and join it again when all have launched.
    const bool branches = memory.ranks_share_process;
    const cudaStream_t stream = branches ? branch_ : static_cast<cudaStream_t>(args.stream);
    if (branches) check(cudaStreamWaitEvent(stream, staged_.get()), "cannot leave the caller's stream");
    launch_plan(plan_launch(workspace, peers, num_sms(memory)), stream);
    launch_forward(params, args.saved != nullptr, num_sms(memory), stream);
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

  PlanLaunch plan_launch(const Workspace& workspace, const Peers& peers, int32_t num_sms) const {
    PlanLaunch launch{};
    launch.plan = workspace.plan;
    launch.scratch = workspace.scratch;
    launch.table = workspace.table;
    launch.choice = forward_choice();
    launch.flags = workspace.flags;
    std::copy_n(peers.controls, kMaxRanks, launch.controls);
    std::copy_n(peers.topk_idx, kMaxRanks, launch.topk_idx);
    std::copy_n(peers.topk_weights, kMaxRanks, launch.topk_weights);
    std::copy_n(peers.num_tokens, kMaxRanks, launch.num_tokens);
    launch.report = &state_->report;
    launch.call = {CallKind::kForward, fingerprint_};
    launch.deadline_s = options_.deadline_s;
    launch.num_sms = num_sms;
    return launch;
  }

  ForwardParams forward_params(const Workspace& workspace, const weft_forward_args& args, const Peers& peers) const {
    const LayerShape& shape = options_.shape;
    const weft_inputs& inputs = *args.inputs;
    const int64_t hidden = shape.hidden;
    const int64_t intermediate = shape.intermediate;
    const int64_t experts = shape.num_local_experts();
    const int64_t rows = shape.capacity_rows();
    const bool together = inputs.gate_up != nullptr;
    const int64_t stride = (together ? 2 : 1) * intermediate * hidden;
    const auto* gate = static_cast<const Bf16*>(together ? inputs.gate_up : inputs.gate);
    const auto* up = together ? gate + intermediate * hidden : static_cast<const Bf16*>(inputs.up);
    const auto rows_of = [&](const Bf16* base, int64_t cols, int32_t box_rows, const char* name) {
      return make_tensor_map({base, {cols, rows, 1}, {cols, rows * cols}, {box_rows, 1}}, name);
    };

    ForwardParams params{};
    params.gate = make_tensor_map({gate, {hidden, intermediate, experts}, {hidden, stride}, {128, 1}}, "gate");
    params.up = make_tensor_map({up, {hidden, intermediate, experts}, {hidden, stride}, {128, 1}}, "up");
    params.down = make_tensor_map(
        {inputs.down, {intermediate, hidden, experts}, {intermediate, intermediate * hidden}, {128, 1}}, "down");
    params.x_pool = rows_of(workspace.x, hidden, kBlockRows, "workspace");
    params.act = rows_of(workspace.act, intermediate, kBlockRows, "workspace");
    params.act_store = rows_of(workspace.act, intermediate, 16, "workspace");
    params.rows_store = rows_of(workspace.rows, hidden, 16, "workspace");
    if (args.saved != nullptr) {
      params.z_store =
          make_tensor_map({args.saved, {intermediate, 2, rows}, {intermediate, 2 * intermediate}, {1, 16}}, "saved");
    }
    params.plan = workspace.plan;
    params.flags = workspace.flags;
    params.table = workspace.table;
    params.state = workspace.scratch.state;
    params.topk_idx = workspace.scratch.topk_idx;
    std::copy_n(peers.x, kMaxRanks, params.pulls[0].source);
    params.pulls[0].pool = workspace.x;
    params.num_pulls = 1;
    params.rows = workspace.rows;
    params.result = static_cast<Bf16*>(args.y);
    params.token_sum = workspace.token_sum;
    std::copy_n(peers.partial, kMaxRanks, params.partial);
    std::copy_n(peers.arrived, kMaxRanks, params.arrived);
    params.clamp_limit = static_cast<float>(options_.clamp_limit);
    std::copy_n(peers.controls, kMaxRanks, params.controls);
    params.report = &state_->report;
    params.host_report = host_report_.get();
    params.deadline_ns = static_cast<uint64_t>(options_.deadline_s * 1e9);
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
