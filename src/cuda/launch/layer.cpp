#include "cuda/launch/layer.hpp"

#include <cuda_runtime_api.h>

#include <utility>

#include "core/status.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/launch/plan.hpp"
#include "cuda/launch/tensor_map.hpp"
#include "protocol/stall.hpp"

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

TaskChoice forward_choice() { return {Direction::kForward, kForwardWork, kHopperTiling}; }

// The caller's scratch on the device.
struct Workspace {
  LocalFlags flags;
  Plan plan;
  PlanScratch scratch;
  TaskTable table;
  Bf16* x;     // [capacity, H]
  Bf16* act;   // [capacity, I] a' = w silu(g) u
  Bf16* rows;  // [capacity, H] o
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
  return workspace;
}

// What a layer keeps on the device between calls.
struct DeviceState {
  ControlBlock control;
  PlanReport report;
  int64_t num_tokens;
};

class CudaLayer final : public BackendLayer {
 public:
  explicit CudaLayer(const CudaOptions& options) : options_(options) {
    int device = 0;
    check(cudaGetDevice(&device), "no current CUDA device");
    check(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device), "cannot ask the CUDA device");
    if (options.num_sms > 0) num_sms_ = min_of(num_sms_, options.num_sms);
    num_sms_ = max_of(2, num_sms_ / 2 * 2);  // clusters of two
  }

  int64_t workspace_bytes() const override {
    Carver carver;
    carve_workspace(carver, options_.shape);
    return carver.used();
  }
  int64_t saved_bytes() const override {
    return options_.shape.capacity_rows() * 2 * options_.shape.intermediate * static_cast<int64_t>(sizeof(Bf16));
  }
  int64_t symmetric_data_bytes() const override { return 0; }
  int64_t symmetric_flag_bytes() const override { return 0; }

  // One rank: the plan reads the caller's own indices, the kernel the caller's own rows.
  void stage(const RankMemory&, const weft_inputs&, const void*) override {}

  int32_t forward(const RankMemory&, uint32_t, weft_forward_args& args) override {
    check_reported();
    const auto stream = static_cast<cudaStream_t>(args.stream);
    Carver carver(args.workspace);
    const Workspace workspace = carve_workspace(carver, options_.shape);
    launch_stage_tokens(&state_->num_tokens, args.inputs->num_tokens, stream);
    launch_plan(plan_launch(workspace, *args.inputs), stream);
    launch_forward(forward_params(workspace, args), args.saved != nullptr, num_sms_, stream);
    args.generation = 0;  // no backward reads this workspace
    return 1;
  }

  // check_backend_backward lets no caller come here.
  int32_t backward(const RankMemory&, uint32_t, weft_backward_args&) override {
    throw Error(WEFT_INTERNAL, "the CUDA backend has no backward");
  }

  void prepare() override {
    void* device = nullptr;
    check(cudaMalloc(&device, sizeof(DeviceState)), "cannot allocate the layer's device state");
    state_.reset(static_cast<DeviceState*>(device));
    check(cudaMemset(device, 0, sizeof(DeviceState)), "cannot clear the layer's device state");
    void* pinned = nullptr;
    check(cudaHostAlloc(&pinned, sizeof(PlanReport), cudaHostAllocMapped), "cannot allocate pinned host memory");
    host_report_.reset(static_cast<PlanReport*>(pinned));
    *host_report_ = PlanReport{};
  }

  void check_reported() override {
    const PlanFault fault = static_cast<const volatile PlanReport*>(host_report_.get())->fault;
    if (fault == PlanFault::kNone) return;
    const PlanReport report = *host_report_;
    if (fault == PlanFault::kStalled) {
      throw Error(WEFT_STALLED, describe(report.stall, options_.shape.ep_rank, options_.deadline_s));
    }
    *host_report_ = PlanReport{};
    check(cudaMemset(&state_->report, 0, sizeof(PlanReport)), "cannot clear the layer's report");
    throw Error(WEFT_INVALID_ARGUMENT, words("found by the device in an earlier call: topk_idx of rank ", report.rank,
                                             " at token ", report.token, ", slot ", report.slot, " is ", report.value,
                                             "; allowed: 0 to ", options_.shape.num_experts - 1, ", or ", kMaskedRoute,
                                             " for a masked route, as which it was taken"));
  }

 private:
  PlanLaunch plan_launch(const Workspace& workspace, const weft_inputs& inputs) const {
    PlanLaunch launch{};
    launch.plan = workspace.plan;
    launch.scratch = workspace.scratch;
    launch.table = workspace.table;
    launch.choice = forward_choice();
    launch.flags = workspace.flags;
    launch.controls[0] = &state_->control;
    launch.topk_idx[0] = inputs.topk_idx;
    launch.topk_weights[0] = inputs.topk_weights;
    launch.num_tokens[0] = &state_->num_tokens;
    launch.report = &state_->report;
    launch.call = {CallKind::kForward, 0};
    launch.deadline_s = options_.deadline_s;
    launch.num_sms = num_sms_;
    return launch;
  }

  ForwardParams forward_params(const Workspace& workspace, const weft_forward_args& args) const {
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
    for (const auto& [pointer, name] : {std::pair<const void*, const char*>{inputs.x, "x"}, {args.y, "y"}}) {
      require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, WEFT_INVALID_ARGUMENT, name,
              " must be aligned to 16 bytes; its address ends in ", reinterpret_cast<uintptr_t>(pointer) % 16);
    }
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
    params.pulls[0] = {{static_cast<const Bf16*>(inputs.x)}, workspace.x};
    params.num_pulls = 1;
    params.rows = workspace.rows;
    params.result = static_cast<Bf16*>(args.y);
    params.clamp_limit = static_cast<float>(options_.clamp_limit);
    params.controls[0] = &state_->control;
    params.report = &state_->report;
    params.host_report = host_report_.get();
    params.deadline_ns = static_cast<uint64_t>(options_.deadline_s * 1e9);
    return params;
  }

  CudaOptions options_;
  int num_sms_ = 0;
  std::unique_ptr<DeviceState, DeviceDeleter> state_;
  std::unique_ptr<PlanReport, PinnedDeleter> host_report_;
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
  if (options.shape.ep_size != 1) {
    return words("the CUDA backend runs one rank today (ep_size 1, got ", options.shape.ep_size,
                 "); use device \"cpu\"");
  }
  if (options.shape.max_passes() != 1) {
    return "the CUDA backend works in one pass today; leave capacity_rows at 0";
  }
  return "";
}

std::unique_ptr<BackendLayer> make_cuda_layer(const CudaOptions& options) {
  return std::make_unique<CudaLayer>(options);
}

}  // namespace weft
