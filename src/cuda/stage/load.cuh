// Loading: one lane of each CTA fills the ring of stages by TMA. Which boxes make up the operands of a kernel's tasks
// its Operands say:
//   num_steps(head)                       steps of K
//   first_row(head)                       pool row of the tile, where that is an operand's
//   load_a(a, full, tile, step)           kBytesA
//   load_b<Load>(b, tile, step, half, load)             half of kBytesB; `load` is tma_load, or multicast
//   num_extra(head), load_extra(a, b, full, tile, n)    stages behind the last step that the epilogue reads
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/stage/schedule.cuh"

namespace weft {

// What the load lane knows of a task throughout its steps.
struct LoadTile : TaskHead {
  int32_t first_row;
};

// One lane. That of the cluster's first CTA asks for the next task, a few stages before it can load for it.
template <class Operands>
__device__ __forceinline__ void run_load(const Operands& operands, SharedTile& shared, uint32_t cta) {
  RingPosition<kTaskSlots> slot;
  RingPosition<kStages> stage;
  const auto want_task = [&] {
    if (cta == 0) ptx::mbarrier_arrive(&shared.task_wanted);
  };
  want_task();
  for (;;) {
    const TaskHead head = take_task(shared, slot);
    release_task(shared, slot);
    slot.advance();
    if (head.ends()) return;
    if (head.ends_pass()) {
      want_task();
      continue;
    }
    const int32_t num_steps = operands.num_steps(head);
    const int32_t num_extra = operands.num_extra(head);
    const int32_t want_step = max_of(0, num_steps + num_extra - kClaimStages);
    if (num_steps == 0) want_task();
    ptx::fence_proxy_async();  // the inputs were written by ordinary or bulk stores of other SMs
    const LoadTile tile{head, operands.first_row(head)};
    for (int32_t step = 0; step < num_steps; ++step) {
      if (step == want_step) want_task();
      ptx::mbarrier_wait(&shared.stage_empty[stage.index], stage.phase ^ 1);
      uint64_t* full = &shared.stage_full[stage.index];
      uint8_t* b = shared.b[stage.index];
      ptx::mbarrier_arrive_expect_tx(full, kBytesA + kBytesB);
      operands.load_a(shared.a[stage.index], full, tile, step);
      if (head.shares_b) {
        constexpr uint16_t kBoth = (1U << kClusterCtas) - 1;
        operands.load_b(b + cta * (kBytesB / 2), tile, step, static_cast<int32_t>(cta),
                        [&](const CUtensorMap* map, void* target, int32_t x, int32_t y, int32_t z) {
                          ptx::tma_load_multicast(map, target, full, x, y, z, kBoth);
                        });
      } else {
        for (int32_t half = 0; half < 2; ++half) {
          operands.load_b(b + half * (kBytesB / 2), tile, step, half,
                          [&](const CUtensorMap* map, void* target, int32_t x, int32_t y, int32_t z) {
                            ptx::tma_load(map, target, full, x, y, z);
                          });
        }
      }
      stage.advance();
    }
    for (int32_t n = 0; n < num_extra; ++n) {
      ptx::mbarrier_wait(&shared.stage_empty[stage.index], stage.phase ^ 1);
      operands.load_extra(shared.a[stage.index], shared.b[stage.index], &shared.stage_full[stage.index], tile, n);
      stage.advance();
    }
  }
}

}  // namespace weft
