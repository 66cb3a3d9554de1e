// The fused forward of one rank: one persistent kernel, one CTA an SM.
//
//   warps   role        registers  waits for                             raises
//   0-1     load        88         task_full, stage_empty                stage_full
//   2       scheduler   88         mid_ready, task_empty                 task_full
//   3       combine     88         out_ready of a token's rows           (y is complete)
//   4-11    math        208        task_full, stage_full                 stage_empty; mid_ready, out_ready
#include "cuda/launch/forward.hpp"

#include "core/status.hpp"
#include "cuda/stage/combine.cuh"
#include "cuda/stage/math.cuh"

namespace weft {
namespace {

constexpr int32_t kThreads = 384;
constexpr size_t kSharedBytes = sizeof(SharedTile) + 1024;  // the base is aligned to 1024 by hand

template <bool kSaveZ>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  // What the plan's launch found wrong reaches the host with this one. If it ended early there is nothing to run.
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.report->fault != PlanFault::kNone) {
    *params.host_report = *params.report;
  }
  if (params.state->ready == 0) return;
  extern __shared__ uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<SharedTile*>((reinterpret_cast<uintptr_t>(raw_shared) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int32_t stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(&shared.stage_full[stage], 1 + kGatherArrivals);
      ptx::mbarrier_init(&shared.stage_empty[stage], kMathWarps);
    }
    for (int32_t slot = 0; slot < kTaskSlots; ++slot) {
      ptx::mbarrier_init(&shared.task_full[slot], 1);
      ptx::mbarrier_init(&shared.task_empty[slot], kTaskReaders);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t warpgroup = warp / 4;
  if (warpgroup == 0) {
    ptx::give_registers<88>();
    if (warp < kLoadWarps) {
      run_load(params, shared, warp);
    } else if (warp == kLoadWarps) {
      run_scheduler(params, shared);
    } else {
      run_combine<1, 8>(params);
    }
  } else {
    ptx::take_registers<208>();
    run_math<kSaveZ>(params, shared, warpgroup - 1);
    run_combine<4, 8>(params);
  }
}

__global__ void stage_tokens_kernel(int64_t* target, int64_t num_tokens) { *target = num_tokens; }

}  // namespace

void launch_stage_tokens(int64_t* target, int64_t num_tokens, cudaStream_t stream) {
  stage_tokens_kernel<<<1, 1, 0, stream>>>(target, num_tokens);
  const cudaError_t status = cudaGetLastError();
  require(status == cudaSuccess, WEFT_INTERNAL, "the staging kernel did not start: ", cudaGetErrorString(status));
}

void launch_forward(const ForwardParams& params, bool save_z, int32_t num_sms, cudaStream_t stream) {
  const auto kernel = save_z ? forward_kernel<true> : forward_kernel<false>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (status == cudaSuccess) {
    kernel<<<static_cast<unsigned>(num_sms), kThreads, kSharedBytes, stream>>>(params);
    status = cudaGetLastError();
  }
  require(status == cudaSuccess, WEFT_INTERNAL, "the forward kernel did not start: ", cudaGetErrorString(status));
}

}  // namespace weft
