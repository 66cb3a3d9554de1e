#include "cuda/launch/layer.hpp"

#include <cuda_runtime_api.h>

#include <bit>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "cuda/launch/fault.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/phases.hpp"
#include "cuda/launch/probed.hpp"
#include "cuda/launch/rank_call.hpp"
#include "cuda/launch/runtime.hpp"
#include "cuda/launch/workspace_records.hpp"
#include "protocol/rank_barrier.hpp"
#include "protocol/stall.hpp"
#include "symmetric/cuda_device.hpp"

namespace weft {
namespace {

void require_aligned(std::initializer_list<std::pair<const void*, const char*>> arguments) {
  for (const auto& [pointer, name] : arguments) {
    require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, WEFT_INVALID_ARGUMENT, name,
            " must be aligned to 16 bytes; its address ends in ", reinterpret_cast<uintptr_t>(pointer) % 16);
  }
}

// What a layer keeps on the device between calls.
struct DeviceState {
  ControlBlock control;  // of a single rank; otherwise the group's is used
  PlanReport report;
  int64_t num_tokens;
};

class CudaLayer final : public BackendLayer {
 public:
  explicit CudaLayer(const CudaOptions& options) : options_(options), device_(current_cuda_device()) {}
  ~CudaLayer() override {
    // Freeing waits for the device, and may keep a peer of this process from launching what it waits for.
    if (gathering_ != nullptr) cudaStreamSynchronize(gathering_->stream.get());
  }

  int64_t workspace_bytes() const override {
    Carver carver;
    carve_workspace(carver, options_.shape, Direction::kBackward);
    return carver.used();
  }
  int64_t forward_workspace_bytes() const override {
    Carver carver;
    carve_workspace(carver, options_.shape, Direction::kForward);
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

  void stage(const RankMemory& memory, weft_forward_args& args) override {
    const CurrentDevice current(device_);
    stage_inputs(memory, *args.inputs, nullptr, args.stream);
    prepare_call(memory, args);
    gather(memory, args.stream);
  }
  void stage(const RankMemory& memory, weft_backward_args& args) override {
    const CurrentDevice current(device_);
    const bool in_place = args.saved != nullptr && workspace_records().holds(args.workspace, args.generation);
    args.source = in_place ? WEFT_SOURCE_WORKSPACE : args.saved != nullptr ? WEFT_SOURCE_SAVED : WEFT_SOURCE_RECOMPUTED;
    stage_inputs(memory, *args.inputs, args.dy, args.stream);
    prepare_call(memory, args);
    gather(memory, args.stream);
  }

  int32_t forward(const RankMemory& memory, uint32_t, weft_forward_args& args) override {
    const CurrentDevice current(device_);
    workspace_records().forget(args.workspace, workspace_bytes());
    launch(memory, args, Direction::kForward, &RankCall::forward,
           [&](std::span<const ForwardParams> ranks, int32_t num_sms, cudaStream_t stream) {
             launch_forward(ranks, args.saved != nullptr, num_sms, stream);
           });
    args.generation = 0;
    if (args.saved != nullptr &&
        !skips_phases(args.debug)) {  // without z a backward would have to compute again all the same
      args.generation = next_generation();
      workspace_records().keep(args.workspace, workspace_bytes(), args.generation);
    }
    return 1;
  }

  int32_t backward(const RankMemory& memory, uint32_t, weft_backward_args& args) override {
    const CurrentDevice current(device_);
    if (args.source != WEFT_SOURCE_WORKSPACE) workspace_records().forget(args.workspace, workspace_bytes());
    launch(memory, args, Direction::kBackward, &RankCall::backward,
           [](std::span<const BackwardParams> ranks, int32_t num_sms, cudaStream_t stream) {
             launch_backward(ranks, num_sms, stream);
           });
    return 1;
  }

  void prepare(uint32_t fingerprint) override {
    const CurrentDevice current(device_);
    fingerprint_ = fingerprint;
    void* device = nullptr;
    check_cuda(cudaMalloc(&device, sizeof(DeviceState)), "cannot allocate the layer's device state");
    state_.reset(static_cast<DeviceState*>(device));
    write_to_device(state_.get(), DeviceState{});
    void* pinned = nullptr;
    check_cuda(cudaHostAlloc(&pinned, sizeof(PlanReport), cudaHostAllocMapped), "cannot allocate pinned host memory");
    host_report_.reset(static_cast<PlanReport*>(pinned));
    *host_report_ = PlanReport{};
    load_stage();
    load_plan();
    usable_sms_ = min_of(load_forward(), load_backward());
    require(usable_sms_ > 0, WEFT_UNSUPPORTED, "device ", device_,
            " cannot hold two CTAs of a cluster, each with all shared memory of an SM; use a whole Hopper GPU, or a "
            "partition with two SMs of one cluster");
    if (is_alone()) return;
    call_.staged = make_event();
    load_probed_forward();
    load_probed_backward();
    load_phases();
  }

  void leave() override {
    if (gathering_ != nullptr) gathering_->roll.leave(options_.shape.ep_rank);
  }

  void join(void* caller_stream) override {
    const CurrentDevice current(device_);
    check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(caller_stream), gathering_->done.get()),
               "cannot join a stream");
  }

  void check_reported() override {
    const PlanFault fault = static_cast<const volatile PlanReport*>(host_report_.get())->fault;
    if (fault == PlanFault::kNone) return;
    const PlanReport report = *host_report_;
    if (fault == PlanFault::kStalled) {
      throw Error(WEFT_STALLED, describe(report.stall, options_.shape.ep_rank, options_.deadline_s));
    }
    const CurrentDevice current(device_);
    write_to_device(&state_->report, PlanReport{});  // first: a launch copies it over the host's
    *host_report_ = PlanReport{};
    throw Error(WEFT_INVALID_ARGUMENT, "found by the device in an earlier call: " + describe(report, options_.shape));
  }

 private:
  bool is_alone() const { return options_.shape.ep_size == 1; }
  LaunchParams launch_params() const { return {options_, &state_->report, host_report_.get()}; }

  // Kernels of ranks that share a device must all be resident at once: they wait for one another. Even, since the
  // kernels run in clusters of two.
  int32_t num_sms(const RankMemory& memory) const {
    const int32_t sms =
        options_.num_sms > 0 ? min_of(options_.num_sms, usable_sms_) : usable_sms_ / memory.ranks_on_device;
    return max_of(2, sms / 2 * 2);
  }
  void check_share(const RankMemory& memory) const {
    const int32_t ranks = memory.ranks_on_device;
    require(ranks * num_sms(memory) <= usable_sms_, WEFT_INVALID_ARGUMENT, "num_workers (num_sms) is ",
            options_.num_sms, " and ", ranks, " ranks of the group share device ", device_, " with ", usable_sms_,
            " usable SMs, which cannot run them at once; allowed: up to ", usable_sms_ / ranks, ", or 0 for ",
            max_of(2, usable_sms_ / ranks / 2 * 2));
  }

  // A single rank's kernels read the caller's own indices and rows. Otherwise what the peers read is copied in the
  // order of the caller's stream, whose earlier calls have drained: nobody reads any more what they staged.
  void stage_inputs(const RankMemory& memory, const weft_inputs& inputs, const void* dy, void* caller_stream) const {
    const auto stream = static_cast<cudaStream_t>(caller_stream);
    if (is_alone()) return launch_stage({&state_->num_tokens, inputs.num_tokens, 0, {}}, stream);
    check_share(memory);
    const LayerShape& shape = options_.shape;
    Carver carver(memory.data[shape.ep_rank]);
    const auto own = carve_symmetric_data<Bf16>(carver, shape);
    StageParams params{own.num_tokens, inputs.num_tokens, 0, {}};
    const auto copy = [&](void* target, const void* source, int64_t columns, size_t element_bytes) {
      const int64_t bytes = inputs.num_tokens * columns * static_cast<int64_t>(element_bytes);
      params.copies[params.num_copies++] = {target, source, bytes};
    };
    copy(own.topk_idx, inputs.topk_idx, shape.top_k, sizeof(int32_t));
    copy(own.topk_weights, inputs.topk_weights, shape.top_k, sizeof(float));
    copy(own.x, inputs.x, shape.hidden, sizeof(Bf16));
    if (dy != nullptr) copy(own.dy, dy, shape.hidden, sizeof(Bf16));
    launch_stage(params, stream);
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
    return peers_in(memory, options_.shape);
  }

  void prepare_call(const RankMemory& memory, const weft_forward_args& args) {
    Carver carver(args.workspace);
    const Workspace workspace = carve_workspace(carver, options_.shape, Direction::kForward);
    const Peers peers = peers_of(memory, *args.inputs);
    const Call call{CallKind::kForward, fingerprint_};
    call_.num_sms = num_sms(memory);
    call_.plan = launch_params().plan(workspace, peers, kForwardChoice, call);
    call_.forward = launch_params().forward(workspace, args, peers, kForwardChoice);
  }

  void prepare_call(const RankMemory& memory, const weft_backward_args& args) {
    Carver carver(args.workspace);
    const Workspace workspace = carve_workspace(carver, options_.shape, Direction::kBackward);
    const Peers peers = peers_of(memory, *args.inputs, args.dy);
    const bool wants_dx = args.want_dx != 0;
    const bool wants_dtopk = args.want_dtopk_weights != 0;
    const bool wants_gate_up = args.dgate_up != nullptr || args.dgate != nullptr;
    const Recompute recompute = args.source == WEFT_SOURCE_RECOMPUTED ? Recompute::kAlways
                                : options_.shape.max_passes() > 1     ? Recompute::kInSeveralPasses
                                                                      : Recompute::kNever;
    const Work work{wants_dx || wants_dtopk, wants_dx, args.ddown != nullptr, wants_gate_up, recompute};
    const TaskChoice choice = backward_choice(work);
    // Made anew even where the forward's is still there - the same bits - since the tasks are others.
    const uint32_t wants = (wants_dx ? 1U : 0U) | (wants_dtopk ? 2U : 0U);
    const Call call{CallKind::kBackward, fingerprint_ << 2 | wants};
    call_.num_sms = num_sms(memory);
    call_.plan = launch_params().plan(workspace, peers, choice, call);
    call_.backward = launch_params().backward(workspace, args, peers, choice);
  }

  static int32_t first_of(const RankMemory& memory) { return std::countr_zero(memory.ranks_together); }

  // Enters the prepared call among those that the first rank launches.
  void gather(const RankMemory& memory, void* caller_stream) {
    if (!memory.ranks_share_process) return;
    if (gathering_ == nullptr) {
      const OutsideCapture outside;
      gathering_ = Gathering::of(memory.controls[first_of(memory)]);
    }
    check_cuda(cudaEventRecord(call_.staged.get(), static_cast<cudaStream_t>(caller_stream)),
               "cannot record a CUDA event");
    gathering_->roll.join(options_.shape.ep_rank, call_);
  }

  // Launches this rank's call in its stream; or, by the first of the ranks that launch together, those of all of them
  // in a stream of their own, which leaves each caller's behind the staging and which join() leads back.
  template <class Args, class Params, class Kernel>
  void launch(const RankMemory& memory, const Args& args, Direction direction, Params RankCall::*params,
              const Kernel& kernel) {
    or_give_up(memory, [&] {
      const PhaseOptions phases = phase_options(args.debug);
      if (!memory.ranks_share_process) {
        return launch_calls({&call_}, direction, params, phases, static_cast<cudaStream_t>(args.stream), kernel);
      }
      if (first_of(memory) != options_.shape.ep_rank) return;
      gathering_->roll.launch(memory.ranks_together, [&](const std::vector<const RankCall*>& calls) {
        const cudaStream_t stream = gathering_->stream.get();
        for (const RankCall* call : calls) {
          check_cuda(cudaStreamWaitEvent(stream, call->staged.get()), "cannot leave the caller's stream");
        }
        try {
          launch_calls(calls, direction, params, phases, stream, kernel);
        } catch (...) {
          cudaEventRecord(gathering_->done.get(), stream);
          throw;
        }
        check_cuda(cudaEventRecord(gathering_->done.get(), stream), "cannot record a CUDA event");
      });
    });
  }

  template <class Params, class Kernel>
  static void launch_calls(const std::vector<const RankCall*>& calls, Direction direction, Params RankCall::*params,
                           const PhaseOptions& phases, cudaStream_t stream, const Kernel& kernel) {
    std::vector<PlanLaunch> plans;
    std::vector<Params> ranks;
    int32_t num_sms = calls[0]->num_sms;
    for (const RankCall* call : calls) {
      plans.push_back(call->plan);
      ranks.push_back(call->*params);
      num_sms = min_of(num_sms, call->num_sms);
    }
    launch_plan(plans, num_sms, stream);
    launch_phases(std::span(ranks), phases, direction, stream,
                  [&](std::span<const Params> launch) { kernel(launch, num_sms, stream); });
  }

  static bool skips_phases(const weft_debug* debug) { return debug != nullptr && debug->skipped_phases != 0; }
  PhaseOptions phase_options(const weft_debug* debug) const {
    PhaseOptions options{options_.phased, 0, {}};
    if (debug == nullptr) return options;
    options.skipped = debug->skipped_phases;
    options.probe = {static_cast<weft_trace_record*>(debug->trace),
                     static_cast<uint32_t>(debug->trace_bytes / static_cast<int64_t>(sizeof(weft_trace_record))),
                     debug->max_delay_ns, debug->delay_seed};
    return options;
  }

  template <class Launch>
  void or_give_up(const RankMemory& memory, Launch launch) const {
    try {
      launch();
    } catch (...) {
      give_up(memory);
      throw;
    }
  }

  // This rank has met its peers and cannot launch: their kernels need not wait until the deadline.
  void give_up(const RankMemory& memory) const {
    if (is_alone()) return;
    for (int32_t peer = 0; peer < options_.shape.ep_size; ++peer) {
      try {
        write_to_device(&memory.controls[peer]->abort, encode_abort(options_.shape.ep_rank, -1));
      } catch (const Error&) {
        // Why this rank gives up is the thing to say.
      }
    }
  }

  CudaOptions options_;
  int device_;
  int32_t usable_sms_ = 0;  // on which the kernels can be at once
  std::unique_ptr<DeviceState, DeviceDeleter> state_;
  std::unique_ptr<PlanReport, PinnedDeleter> host_report_;
  uint32_t fingerprint_ = 0;
  RankCall call_{};
  std::shared_ptr<Gathering> gathering_;  // of ranks that share a process
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
  if (options.shape.ep_size > kMaxCudaRanks) {
    return words("ep_size is ", options.shape.ep_size, "; the CUDA backend takes up to ", kMaxCudaRanks,
                 " ranks, the GPUs of one machine");
  }
  if (options.shape.max_passes() > kMostPasses) {
    return words("capacity_rows is ", options.shape.capacity_rows(), ", with which a routing may take ",
                 options.shape.max_passes(), " passes; the CUDA backend works in at most ", kMostPasses,
                 ": raise capacity_rows, or leave it at 0 for the default");
  }
  if (most_row_bytes(options.shape) > kMostRowBytes) {
    return words("max_tokens is ", options.shape.max_tokens, " on each of ", options.shape.ep_size,
                 " ranks and capacity_rows ", options.shape.capacity_rows(),
                 ": rows of hidden = ", options.shape.hidden, " would take ", most_row_bytes(options.shape) >> 30,
                 " GiB; the CUDA backend counts up to ", kMostRowBytes >> 30,
                 ": lower max_tokens, or on several ranks capacity_rows");
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
