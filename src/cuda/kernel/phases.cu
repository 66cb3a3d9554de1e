// Small kernels between the launches of a call that runs phase by phase, or leaves phases out.
#include "core/status.hpp"
#include "cuda/launch/phases.hpp"
#include "cuda/stage/schedule.cuh"

namespace weft {
namespace {

__global__ void reset_tickets_kernel(PassFlags flags) {
  *flags.matrix_ticket = 0;
  *flags.comm_ticket = 0;
}

__global__ void raise_flags_kernel(const __grid_constant__ PersistentParams params, Direction direction,
                                   PhaseMask skipped) {
  const LayerShape& shape = params.plan.shape;
  const PassFlags& flags = params.flags.banks[0];
  const bool forward = direction == Direction::kForward;
  const int32_t num_parts = forward ? kHopperTiling.down_parts : 1;
  const auto is_skipped = [&](TaskKind kind) { return (skipped & matrix_phase(kind)) != 0; };
  const bool no_z = !forward && is_skipped(TaskKind::kGateUp);
  const bool no_mid = is_skipped(forward ? TaskKind::kGateUp : TaskKind::kDownDgrad);
  const bool no_out = is_skipped(forward ? TaskKind::kDown : TaskKind::kGateUpDgrad);
  const auto stride = static_cast<int32_t>(gridDim.x * blockDim.x);
  for (auto block = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x); block < shape.capacity_blocks;
       block += stride) {
    if (no_z) flags.z_ready[block] = z_target(shape);
    if (no_mid) flags.mid_ready[block] = mid_target(shape, direction);
    for (int32_t part = 0; no_out && part < num_parts; ++part) {
      flags.out_ready[part * shape.capacity_blocks + block] = out_target(shape, part, num_parts);
    }
  }
}

void check(cudaError_t status, const char* what) {
  require(status == cudaSuccess, WEFT_INTERNAL, what, ": ", cudaGetErrorString(status));
}

}  // namespace

void load_phases() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reset_tickets_kernel), "cannot load the kernel that resets tickets");
}

void launch_reset_tickets(const PassFlags& flags, cudaStream_t stream) {
  reset_tickets_kernel<<<1, 1, 0, stream>>>(flags);
  check(cudaGetLastError(), "the kernel that resets tickets did not start");
}

void launch_raise_flags(const PersistentParams& params, Direction direction, PhaseMask skipped, cudaStream_t stream) {
  constexpr int32_t kRaiseThreads = 256;
  const int32_t ctas = ceil_div(params.plan.shape.capacity_blocks, kRaiseThreads);
  raise_flags_kernel<<<static_cast<unsigned>(ctas), kRaiseThreads, 0, stream>>>(params, direction, skipped);
  check(cudaGetLastError(), "the kernel that raises flags did not start");
}

}  // namespace weft
