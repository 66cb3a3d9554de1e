#include "cuda/launch/params.hpp"

#include <algorithm>
#include <cstddef>

#include "cuda/launch/tensor_map.hpp"
#include "layout/symmetric.hpp"

namespace weft {
namespace {

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

const TaskTable& table_of(const Workspace& workspace, const TaskChoice& choice) {
  return choice.direction == Direction::kForward ? workspace.forward_table : workspace.backward_table;
}

TokenRows token_rows(const Bf16* const (&source)[kMaxCudaRanks], Bf16* pulled) {
  TokenRows rows{};
  std::copy_n(source, kMaxCudaRanks, rows.source);
  rows.pulled = pulled;
  return rows;
}

}  // namespace

Peers peers_in(const RankMemory& memory, const LayerShape& shape) {
  Peers peers{};
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    Carver data_carver(memory.data[peer]);
    Carver flag_carver(memory.flags[peer]);
    const auto data = carve_symmetric_data<Bf16>(data_carver, shape);
    peers.controls[peer] = memory.controls[peer];
    peers.num_tokens[peer] = data.num_tokens;
    peers.topk_idx[peer] = data.topk_idx;
    peers.topk_weights[peer] = data.topk_weights;
    peers.x[peer] = data.x;
    peers.dy[peer] = data.dy;
    peers.partial[peer] = data.partial;
    peers.dtopk_weights[peer] = data.dtopk_weights;
    peers.arrived[peer] = carve_symmetric_flags(flag_carver, shape).arrived;
  }
  return peers;
}

PlanLaunch LaunchParams::plan(const Workspace& workspace, const Peers& peers, const TaskChoice& choice,
                              const Call& call) const {
  PlanLaunch launch{};
  launch.plan = workspace.plan;
  launch.scratch = workspace.scratch;
  launch.table = table_of(workspace, choice);
  launch.choice = choice;
  launch.flags = workspace.flags;
  std::copy_n(peers.controls, kMaxCudaRanks, launch.controls);
  std::copy_n(peers.topk_idx, kMaxCudaRanks, launch.topk_idx);
  std::copy_n(peers.topk_weights, kMaxCudaRanks, launch.topk_weights);
  std::copy_n(peers.num_tokens, kMaxCudaRanks, launch.num_tokens);
  launch.report = report_;
  launch.call = call;
  launch.deadline_s = options_.deadline_s;
  return launch;
}

// What both directions have in common; `dy`, `rows` and where router gradients go are the direction's own.
void LaunchParams::fill(PersistentParams& params, const Workspace& workspace, const Peers& peers,
                        const TaskChoice& choice) const {
  params.plan = workspace.plan;
  params.flags = workspace.flags;
  params.table = table_of(workspace, choice);
  params.state = workspace.scratch.state;
  params.topk_idx = workspace.scratch.topk_idx;
  params.row_begin = workspace.scratch.row_begin;
  params.x = token_rows(peers.x, workspace.x);
  params.token_sum = workspace.token_sum;
  params.combine = choice.work.combine;
  params.recompute = choice.work.recompute;
  std::copy_n(peers.partial, kMaxCudaRanks, params.partial);
  std::copy_n(peers.arrived, kMaxCudaRanks, params.arrived);
  std::copy_n(peers.controls, kMaxCudaRanks, params.controls);
  params.report = report_;
  params.host_report = host_report_;
  params.deadline_ns = static_cast<uint64_t>(options_.deadline_s * 1e9);
}

// A pool in the workspace: [capacity, cols], or [capacity, parts, cols] as (cols, parts, capacity).
CUtensorMap LaunchParams::pool_map(const Bf16* base, int64_t cols, int32_t box_rows) const {
  const int64_t rows = options_.shape.capacity_rows();
  return make_tensor_map({base, {cols, rows, 1}, {cols, rows * cols}, {box_rows, 1}}, "workspace");
}

CUtensorMap LaunchParams::pool_map_in_parts(const void* base, int64_t cols, int64_t parts, int32_t box_rows) const {
  const int64_t rows = options_.shape.capacity_rows();
  return make_tensor_map({base, {cols, parts, rows}, {cols, parts * cols}, {1, box_rows}}, "z");
}

// Expert weights [e, rows, cols] or their gradients.
CUtensorMap LaunchParams::weight_map(const void* base, int64_t rows, int64_t cols, int64_t expert_stride,
                                     int32_t box_rows, const char* name, weft_dtype dtype) const {
  const int64_t experts = options_.shape.num_local_experts();
  return make_tensor_map({base, {cols, rows, experts}, {cols, expert_stride}, {box_rows, 1}, dtype}, name);
}

ForwardParams LaunchParams::forward(const Workspace& workspace, const weft_forward_args& args, const Peers& peers,
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
  params.act = pool_map(workspace.act, intermediate, kBlockRows);
  params.act_store = pool_map(workspace.act, intermediate, 16);
  params.rows_store = pool_map(workspace.rows, hidden, 16);
  if (args.saved != nullptr) params.z_store = pool_map_in_parts(args.saved, intermediate, 2, 16);
  params.pulls_x = params.pulls_x_in_passes = true;
  params.rows = workspace.rows;
  params.result = static_cast<Bf16*>(args.y);
  params.clamp_limit = static_cast<float>(options_.clamp_limit);
  return params;
}

BackwardParams LaunchParams::backward(const Workspace& workspace, const weft_backward_args& args, const Peers& peers,
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
  params.z_in_passes = pool_map_in_parts(workspace.dz, intermediate, 2, kBlockRows);
  params.z = choice.work.recompute == Recompute::kAlways ? params.z_in_passes
                                                         : pool_map_in_parts(args.saved, intermediate, 2, kBlockRows);
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
  params.dy = token_rows(peers.dy, workspace.dy);
  const auto pulls_x = [&](int32_t num_passes) {
    return args.source != WEFT_SOURCE_WORKSPACE &&
           (choice.work.gate_up_wgrad || recomputes(choice.work.recompute, num_passes));
  };
  params.pulls_x = pulls_x(1);
  params.pulls_x_in_passes = pulls_x(2);
  params.rows = choice.work.dgrad ? workspace.rows : nullptr;
  params.result = static_cast<Bf16*>(args.dx);
  params.dw_parts = workspace.dw_partial;
  params.wgrad_carry = workspace.wgrad_carry;
  params.num_dw_tiles = num_dw_tiles(shape);
  if (args.want_dtopk_weights != 0) params.dw_partial = workspace.dw_partial;
  params.dtopk_weights = args.dtopk_weights;
  std::copy_n(peers.dtopk_weights, kMaxCudaRanks, params.dtopk_home);
  params.clamp_limit = static_cast<float>(options_.clamp_limit);
  params.grads_in_fp32 = in_fp32;
  params.accumulates = args.accumulate != 0;
  return params;
}

}  // namespace weft
