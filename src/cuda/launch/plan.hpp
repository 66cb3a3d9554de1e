// launch_plan: one kernel launch in which a rank meets its peers and makes, on the device, everything that the layer's
// kernel runs by: the plan (schedule/plan.hpp, the bits that build_plan makes on the host), the table of matrix tasks,
// and cleared flags. No host synchronisation and no allocation: what changes from call to call - routing, numbers of
// tokens, epoch - is read from device memory, so a captured graph replays. Plain C++ but for the stream's name.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/launch/together.hpp"
#include "layout/carver.hpp"
#include "protocol/flags.hpp"
#include "protocol/gate.hpp"
#include "protocol/rank_barrier.hpp"
#include "schedule/plan.hpp"
#include "schedule/task_order.hpp"

using cudaStream_t = struct CUstream_st*;

namespace weft {

inline constexpr int32_t kMaxPlanCtas = 256;

enum class PlanFault : int32_t {
  kNone,
  kStalled,       // `stall` says who waited for what; the group is finished
  kDisagreement,  // rank `rank` came for the call `value` (rank_barrier.hpp); no rank goes on, the group stays usable
  kNumTokens,     // rank `rank` brought `value` tokens, not in [0, max_tokens]; likewise
  kIndex,  // topk_idx of rank `rank` at `token`, `slot` is `value`; such routes count as masked, the call goes on
};

// What went wrong first since the host last zeroed it; a stall, which finishes the group, also after an index. The
// kernel never clears it.
struct PlanReport {
  PlanFault fault;
  Call own_call;  // kDisagreement: what this rank had come for
  int32_t rank;
  int64_t token;
  int32_t slot;
  int64_t value;
  StallReport stall;
};

// What the next kernel of the stream begins with.
struct PlanState {
  int32_t ready;   // 0: the launch ended early, `report` says why, and there is nothing to run
  uint32_t epoch;  // of pass 0
  int32_t num_own_tokens;
};

// A run of tokens of one source rank, counted and placed by one CTA. Every source has as many, one or more.
struct Chunk {
  PlanFault fault;
  int32_t bad_route;  // kIndex: the first route of the source, at token * K + slot, whose index is out of range
  int64_t value;      // kDisagreement, kNumTokens
  int32_t begin_token;
  int32_t end_token;
};

// A pool row as its route's placing leaves it: one store, so that the scattered writes of a plan are few.
struct alignas(16) RowRecord {
  int32_t token;  // kPaddingToken in a padding row
  int32_t link;   // first pool row of the entry; once entries are listed, in that row itself: where its fan_rows begin
  uint32_t packed;  // stage/plan_place.cuh
  float weight;     // once entries are listed, in an entry's last row: the bits of its place in combine_order
};

struct PlanScratch {
  PlanState* state;        // [1]
  int32_t* topk_idx;       // [ep_size, max_tokens, K] of all ranks, masked where out of range
  int32_t* chunk_counts;   // [chunks, count_words] routes of each chunk to each expert
  Chunk* chunks;           // [chunks]
  uint32_t* block_counts;  // [max_blocks] entries that begin and end in each block of the pool
  RowRecord* records;      // [max_pool_rows]
  uint32_t* row_begin;     // [max_pool_rows] of a valid row: where in [ep_size, max_tokens, H] its token's begins, in
                           // pieces of 16 bytes (counted in 32 bits: 64 GiB)
};

// Words in a row of chunk_counts, which is read four at a time: experts, and behind them whether the chunk is faulty.
WEFT_HD constexpr int32_t count_words(int32_t num_experts) { return align_up(num_experts + 1, 4); }

WEFT_HD inline PlanScratch carve_plan_scratch(Carver& carver, const LayerShape& shape) {
  PlanScratch scratch{};
  const int64_t chunks = max_of(kMaxPlanCtas, shape.ep_size);
  scratch.state = carver.take<PlanState>(1);
  scratch.topk_idx = carver.take<int32_t>(shape.max_routes());
  scratch.chunk_counts = carver.take<int32_t>(chunks * count_words(shape.num_experts));
  scratch.chunks = carver.take<Chunk>(chunks);
  scratch.block_counts = carver.take<uint32_t>(shape.max_blocks());
  scratch.records = carver.take<RowRecord>(shape.max_pool_rows());
  scratch.row_begin = carver.take<uint32_t>(shape.max_pool_rows());
  return scratch;
}

// Which matrix tasks a call runs, and how they cut its products into tiles.
struct TaskChoice {
  Direction direction;
  Work work;
  Tiling tiling;
};

// The matrix tasks of all passes, decoded: ticket t of pass p is tasks[pass_begin[p] + t].
struct TaskTable {
  MatrixTask* tasks;
  int32_t* pass_begin;  // [max_passes + 1]
};

WEFT_HD inline TaskOrder task_order(const Plan& plan, const TaskChoice& choice, int32_t pass, int64_t num_own_tokens) {
  return {plan, choice.direction, pass, num_own_tokens, choice.work, choice.tiling};
}

// An order of which only the bounds may be asked.
WEFT_HD inline TaskOrder task_bounds(const LayerShape& shape, const TaskChoice& choice) {
  Plan plan{};
  plan.shape = shape;
  return task_order(plan, choice, 0, 0);
}

WEFT_HD inline TaskTable carve_task_table(Carver& carver, const LayerShape& shape, const TaskChoice& choice) {
  TaskTable table{};
  table.tasks = carver.take<MatrixTask>(task_bounds(shape, choice).max_matrix_tasks());
  table.pass_begin = carver.take<int32_t>(shape.max_passes() + 1);
  return table;
}

// Pointers are to device memory, those by rank as mapped here; the peers' lie in symmetric memory.
struct PlanLaunch {
  Plan plan;
  PlanScratch scratch;
  TaskTable table;
  TaskChoice choice;
  LocalFlags flags;
  ControlBlock* controls[kMaxCudaRanks];  // zeroed when the group was made
  const int32_t* topk_idx[kMaxCudaRanks];
  const float* topk_weights[kMaxCudaRanks];
  const int64_t* num_tokens[kMaxCudaRanks];
  PlanReport* report;  // zeroed by the host
  Call call;           // what this rank has come to do; the same on every rank
  double deadline_s;   // longest wait for a peer
};

// Loads the kernel. Left to its first launch, loading could wait for kernels of other ranks of this process that run on
// the device already and wait for that launch.
void load_plan();

// Of the ranks of one launch, which bring the same shape, on at most num_sms SMs each (0: all). Ordered in `stream`.
// Throws Error(WEFT_UNSUPPORTED) if the experts exceed what a CTA can count, and Error(WEFT_INTERNAL) if the launch
// itself fails. What goes wrong on the device is in each rank's `report`.
void launch_plan(std::span<const PlanLaunch> ranks, int32_t num_sms, cudaStream_t stream);

}  // namespace weft
