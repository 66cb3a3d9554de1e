// How the plan kernel waits and what it says when something goes wrong: gates whose stalls end in the launch's report,
// and the points that all CTAs of a launch pass together.
#pragma once

#include <cstdint>

#include "cuda/launch/plan.hpp"
#include "cuda/ptx/memory.cuh"
#include "protocol/gate.hpp"

namespace weft {

// True for the one that may fill in the report: the first since the host zeroed it, or the first with more to say than
// bad indices, with which a call goes on.
__device__ inline bool claim(PlanReport* report, PlanFault fault) {
  auto* word = reinterpret_cast<int32_t*>(&report->fault);
  const auto replace = [&](PlanFault old) {
    return atomicCAS(word, static_cast<int32_t>(old), static_cast<int32_t>(fault)) == static_cast<int32_t>(old);
  };
  return replace(PlanFault::kNone) || (fault != PlanFault::kIndex && replace(PlanFault::kIndex));
}

__device__ inline DeviceMemory plan_memory(const PlanLaunch& launch) {
  return DeviceMemory(static_cast<uint64_t>(launch.deadline_s * 1e9));
}

// Gate::wait with a report, by one thread. CTAs that end because this rank itself gave up leave the word to the one
// that did. A call, not inlined: what it does when it fails is long and hardly ever run.
template <class Word>
__device__ __noinline__ bool wait_or_report(const PlanLaunch& launch, const Word* flag, Word expected, Scope scope,
                                            const WaitSite& site, int32_t shift = 0) {
  constexpr int32_t kEagerPolls = 64;
  const int32_t rank = launch.plan.shape.ep_rank;
  DeviceMemory memory = plan_memory(launch);
  // A gate reads a flag twice and the abort word between two polls; most waits here are shorter than that.
#pragma unroll 1
  for (int32_t polls = 0; polls < kEagerPolls; ++polls) {
    if (memory.acquire(flag, scope) >> shift == expected) return true;
  }
  Gate<DeviceMemory> gate(memory, launch.controls, rank, launch.plan.shape.ep_size);
  if (gate.wait(flag, expected, scope, site, shift)) return true;
  if (gate.report().aborted_by != rank && claim(launch.report, PlanFault::kStalled)) {
    launch.report->stall = gate.report();
  }
  return false;
}

// The control block keeps these from launch to launch. They change only when a launch has passed its last point.
__device__ inline ControlBlock* own_control(const PlanLaunch& launch) {
  return launch.controls[launch.plan.shape.ep_rank];
}
__device__ inline uint32_t launch_epoch(const PlanLaunch& launch) { return own_control(launch)->epoch + 1; }

// A group in which a rank has given up stays finished: its later launches end at once. By one thread.
inline __device__ __noinline__ bool ended_by_abort(const PlanLaunch& launch, WaitTask task) {
  const uint32_t abort = plan_memory(launch).poll(&own_control(launch)->abort);
  if (abort == 0) return false;
  if (claim(launch.report, PlanFault::kStalled)) {
    launch.report->stall = stall_report({task, -1, FlagKind::kEntry, -1, -1}, 0, 0, abort);
  }
  return true;
}

// A point of the launch that all its CTAs pass together; needs all of them resident at once. Called by every thread;
// true in all threads of the CTA or, after a stall, in none. Orders all accesses of the grid before the point before
// all after it. The words count on from launch to launch, so nothing has to be cleared between two.
__device__ inline bool pass_point(const PlanLaunch& launch, int32_t point) {
  __syncthreads();
  bool passed = true;
  if (threadIdx.x == 0) {
    ControlBlock* control = own_control(launch);
    uint32_t* arrived = &control->grid_arrived[point];
    const uint32_t all_arrived = control->grid_base + gridDim.x;
    plan_memory(launch).release_add(arrived, 1, Scope::kRank);
    const WaitSite site{WaitTask::kPlan, -1, FlagKind::kGridBarrier, point, -1};
    passed = wait_or_report(launch, arrived, all_arrived, Scope::kRank, site);
  }
  return __syncthreads_and(passed) != 0;
}

// Ends the launch for the next one, by one thread, behind the last of the `num_points` points that it used.
__device__ inline void finish_launch(const PlanLaunch& launch, uint32_t last_epoch, int32_t num_points) {
  ControlBlock* control = own_control(launch);
  const uint32_t all_arrived = control->grid_base + gridDim.x;
  for (int32_t point = num_points; point < kNumGridBarriers; ++point) control->grid_arrived[point] = all_arrived;
  control->grid_base = all_arrived;
  control->epoch = last_epoch;
}

}  // namespace weft
