// The shape of a persistent kernel: which warp of which CTA takes which role.
//
//   warps   role        registers  waits for                             raises
//   0-1     load        104        task_full, stage_empty                task_wanted, stage_full
//   2       scheduler   104        task_wanted, rows_ready, z_ready,     task_full (first CTA of the cluster only: in
//                                  mid_ready, task_empty                 the other one, comm)
//   3       comm        104        out_ready, arrived                    rows_ready; arrived, or a row of the result
//   4-11    math        200        task_full, stage_full                 stage_empty; z_ready, mid_ready, out_ready
//                                                                        and then, without tasks, as comm; load
//                                                                        likewise
//
// A launch runs the phases and passes that its parameters name: all, or one phase at a time on the phased path, where
// every wait inside the rank has been met by the launches before.
#pragma once

#include "core/status.hpp"
#include "cuda/stage/comm.cuh"
#include "cuda/stage/load.cuh"
#include "cuda/stage/math.cuh"

namespace weft {

inline constexpr int32_t kThreads = 384;
inline constexpr size_t kSharedBytes = sizeof(SharedTile) + 1024;  // the base is aligned to 1024 by hand

__device__ __forceinline__ void init_barriers(SharedTile& shared) {
  for (int32_t stage = 0; stage < kStages; ++stage) {
    ptx::mbarrier_init(&shared.stage_full[stage], 1 + kLoadWarps * 32);  // what TMA brings, and what each lane does
    ptx::mbarrier_init(&shared.stage_empty[stage], kClusterCtas * kMathWarps);
  }
  ptx::mbarrier_init(&shared.task_wanted, 1);
  for (int32_t slot = 0; slot < kTaskSlots; ++slot) {
    ptx::mbarrier_init(&shared.task_full[slot], 1);
    ptx::mbarrier_init(&shared.task_empty[slot], kClusterCtas * kTaskReaders);
  }
  ptx::fence_mbarrier_init();
}

// kSumChunks: of the sums of math warps, as in sum_rows. Each role asks anew for its parameters, and for
// operands or bodies over them.
template <int32_t kSumChunks, class Probe, class Launch, class MakeOperands, class MakeBodies>
__device__ __forceinline__ void run_roles(const Launch& launch, Direction direction, const MakeOperands& make_operands,
                                          const MakeBodies& make_bodies) {
  const PersistentParams& params = own_params(launch);
  // What the plan's launch found wrong reaches the host with this one. If it ended early there is nothing to run.
  // The fault is written last: the host looks at it first. Of a stall in a kernel such as this the host has been told.
  const PlanFault found = blockIdx.x == 0 && threadIdx.x == 0 ? params.report->fault : PlanFault::kNone;
  if (found != PlanFault::kNone && (found != PlanFault::kStalled || params.report->stall.stalled)) {
    PlanReport report = *params.report;
    const PlanFault fault = report.fault;
    report.fault = PlanFault::kNone;
    *params.host_report = report;
    __threadfence_system();
    params.host_report->fault = fault;
  }
  if (params.state->ready == 0 || params.launch.first_pass >= *params.plan.num_passes) return;
  // By an offset, not by rounding the address, in which the compiler would no longer see one of shared memory.
  extern __shared__ uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<SharedTile*>(raw_shared + (-ptx::shared_address(raw_shared) & 1023U));
  if (threadIdx.x == 0) init_barriers(shared);
  ptx::cluster_sync();

  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  if (warp < 4) {
    ptx::give_registers<104>();
    const PersistentParams& own = own_params_anew(launch);
    const Probe probe(own);
    if (warp == kLoadWarps && ptx::cluster_rank() == 0) {
      run_scheduler(own, shared, direction, probe);
    } else {
      const bool loads = warp < kLoadWarps;
      if (loads) {
        const typename Probe::Span span = probe.begin(WEFT_TRACE_LOAD);
        run_load(make_operands(), shared, ptx::cluster_rank());
        probe.end(span);
      }
      run_comm_passes(own, direction, loads ? end_pass(own) - 1 : own.launch.first_pass, blockIdx.x == 0 && !loads,
                      probe);
    }
  } else {
    ptx::take_registers<200>();
    run_math(shared, make_bodies, warp / 4 - 1);
    const PersistentParams& own = own_params_anew(launch);
    const int32_t last_pass = end_pass(own) - 1;
    if (enter_pass(own, last_pass)) {
      run_comm<kSumChunks>(own, own_comm_order(own, direction, last_pass), last_pass, Probe(own));
    }
  }
  __syncwarp();
  ptx::cluster_sync();  // the other CTA may still arrive at this one's barriers
}

// A launch of one CTA an SM in clusters of two, of num_sms SMs a rank; `cluster` must live as long.
inline cudaLaunchConfig_t persistent_config(size_t num_ranks, int32_t num_sms, cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterCtas, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_sms), static_cast<unsigned>(num_ranks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return config;
}

template <class Params>
void launch_persistent(void (*kernel)(Params), const Params& params, size_t num_ranks, int32_t num_sms,
                       cudaStream_t stream, const char* name) {
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config = persistent_config(num_ranks, num_sms, cluster);
  config.stream = stream;
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, params);
  require(status == cudaSuccess, WEFT_INTERNAL, name, " did not start: ", cudaGetErrorString(status));
}

// Loads a kernel; returns how many of its CTAs the current device can hold at once.
template <class Params>
int32_t load_persistent(void (*kernel)(Params)) {
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  cudaLaunchAttribute cluster{};
  const cudaLaunchConfig_t config = persistent_config(1, kClusterCtas, cluster);
  int num_clusters = 0;
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config);
  require(status == cudaSuccess, WEFT_INTERNAL, "cannot load a persistent kernel: ", cudaGetErrorString(status));
  return num_clusters * static_cast<int32_t>(kClusterCtas);
}

}  // namespace weft
