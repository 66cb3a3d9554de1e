// The task table: every matrix task of every pass decoded once, so that the kernel that runs them reads a record a
// ticket. TaskOrder alone says what the tasks are.
#pragma once

#include <cstdint>

#include "cuda/stage/plan_shared.cuh"

namespace weft {

// The CTAs share the tickets of every pass; where the experts' blocks lie all of them know.
__device__ inline void write_tasks(const PlanParams& launch, const PlanShared& shared) {
  Plan plan = launch.plan;
  plan.num_passes = shared.num_passes;
  plan.expert_rows = shared.rows + plan.shape.ep_rank * launch.num_local_experts;
  plan.expert_block_begin = shared.local_begin;
  const int32_t stride = num_ctas() * kPlanThreads;
  int32_t first_task = 0;
#pragma unroll 1
  for (int32_t pass = 0; pass < *shared.num_passes; ++pass) {
    const TaskOrder order = task_order(plan, launch.choice, pass, 0);  // own tokens enter no matrix task
    const int32_t num_stages = order.num_stages();
    __syncthreads();  // the stages before have been read
    for_each(num_stages, [&](int32_t stage) { shared.stage_begin[stage] = order.tasks_in_stage(stage); });
    __syncthreads();
    if (warp_idx() == 0) {
      prefix_sums(shared.stage_begin, num_stages, [&](int32_t stage) { return shared.stage_begin[stage]; });
    }
    __syncthreads();
    const int32_t num_tasks = shared.stage_begin[num_stages];
#pragma unroll 1
    for (int32_t ticket = cta_idx() * kPlanThreads + thread_idx(); ticket < num_tasks; ticket += stride) {
      int32_t stage = 0;  // the last one that begins at or before the ticket
      for (int32_t end = num_stages; end - stage > 1;) {
        const int32_t middle = (stage + end) / 2;
        (shared.stage_begin[middle] <= ticket ? stage : end) = middle;
      }
      launch.table.tasks[first_task + ticket] = order.task_of_stage(stage, ticket - shared.stage_begin[stage]);
    }
    if (cta_idx() == 0 && thread_idx() == 0) launch.table.pass_begin[pass] = first_task;
    first_task += num_tasks;
  }
  if (cta_idx() == 0 && thread_idx() == 0) launch.table.pass_begin[*shared.num_passes] = first_task;
}

}  // namespace weft
