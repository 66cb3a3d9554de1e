// How a role of the forward kernel waits for a counter, and how it says that the wait was in vain. Inlined and sparing
// of registers, unlike plan_wait.cuh: a call from a role would cost the math warps their accumulators.
#pragma once

#include "cuda/launch/forward.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/stage/plan_wait.cuh"

namespace weft {

// By one thread. False once the deadline has passed or another thread of the rank has given up; the role ends, and the
// first to give up tells the host why.
__device__ __forceinline__ bool wait_counter(const ForwardParams& params, const uint32_t* counter, uint32_t expected,
                                             WaitTask task, FlagKind flag, int32_t block) {
  constexpr uint32_t kPollsPerLook = 1024;  // at the clock and the abort word
  const int32_t rank = params.plan.shape.ep_rank;
  const uint32_t* abort = &params.controls[rank]->abort;
  uint64_t began_ns = 0;
  for (uint32_t polls = 1; ptx::ld_acquire_gpu(counter) != expected; ++polls) {
    ptx::nanosleep(20);
    if (polls % kPollsPerLook != 0) continue;
    if (began_ns == 0) began_ns = ptx::globaltimer_ns();
    const bool late = ptx::globaltimer_ns() - began_ns > params.deadline_ns;
    if (!late && ptx::ld_relaxed_sys(abort) == 0) continue;
    if (late && claim(params.report, PlanFault::kStalled)) {
      PlanReport* report = params.host_report;
      report->stall.site.task = task;
      report->stall.site.task_idx = -1;
      report->stall.site.flag = flag;
      report->stall.site.flag_idx = block;
      report->stall.site.peer = -1;
      report->stall.expected = expected;
      report->stall.seen = ptx::ld_acquire_gpu(counter);
      report->stall.aborted_by = -1;
      report->stall.blamed = -1;
      report->stall.stalled = true;
      __threadfence_system();
      report->fault = PlanFault::kStalled;
      for (int32_t peer = 0; peer < params.plan.shape.ep_size; ++peer) {
        ptx::st_release_sys(&params.controls[peer]->abort, encode_abort(rank, -1));
      }
    }
    return false;
  }
  return true;
}

}  // namespace weft
