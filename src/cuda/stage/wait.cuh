// How a role of a persistent kernel waits for a counter, and how it says that the wait was in vain. Inlined and sparing
// of registers, unlike plan_wait.cuh: a call from a role would cost the math warps their accumulators.
#pragma once

#include "cuda/launch/persistent.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/stage/plan_wait.cuh"

namespace weft {

// By one thread. False once the deadline has passed or another thread or rank has given up; the role ends, and the
// first of the rank to give up tells the host why. `kScope` says whose threads raise the counter.
template <Scope kScope = Scope::kRank>
__device__ __forceinline__ bool wait_counter(const PersistentParams& params, const uint32_t* counter, uint32_t expected,
                                             const WaitSite& site) {
  constexpr uint32_t kEagerPolls = 64;      // a long wait leaves the memory system and the power to those who work
  constexpr uint32_t kPollsPerLook = 1024;  // at the clock and the abort word
  // Polls are relaxed, the acquire comes once, behind the last.
  const auto acquired = [&] {
    if (ptx::ld_relaxed_sys(counter) != expected) return false;
    return (kScope == Scope::kRank ? ptx::ld_acquire_gpu(counter) : ptx::ld_acquire_sys(counter)) == expected;
  };
  const int32_t rank = params.plan.shape.ep_rank;
  const uint32_t* abort = &params.controls[rank]->abort;
  uint64_t began_ns = 0;
  for (uint32_t polls = 1; !acquired(); ++polls) {
    ptx::nanosleep(polls < kEagerPolls ? 20 : 200);
    if (polls % kPollsPerLook != 0) continue;
    if (began_ns == 0) began_ns = ptx::globaltimer_ns();
    const bool late = ptx::globaltimer_ns() - began_ns > params.deadline_ns;
    const uint32_t seen_abort = ptx::ld_relaxed_sys(abort);
    if (!late && seen_abort == 0) continue;
    if (claim(params.report, PlanFault::kStalled)) {
      params.host_report->stall = stall_report(site, expected, ptx::ld_relaxed_sys(counter), seen_abort);
      __threadfence_system();
      params.host_report->fault = PlanFault::kStalled;
    }
#pragma unroll 1
    for (int32_t peer = 0; seen_abort == 0 && peer < params.plan.shape.ep_size; ++peer) {
      ptx::st_release_sys(&params.controls[peer]->abort, encode_abort(rank, site.peer));
    }
    return false;
  }
  return true;
}

}  // namespace weft
