// The plan kernel: which stage runs between which points of the grid, and the launch.
//
//   before point 0   CTA 0 arrives at every peer; counters cleared; each CTA waits for its chunks' sources, counts them
//   before point 1   each CTA lays out and places its chunks, and writes its share of the task table
//   before point 2   entries listed
//   then             entries linked; CTA 0 moves the epoch on
//
// It ends before its work is done if the group is finished, a wait stalls, or ranks disagree: `report` says so and
// state->ready stays 0.
#include <cuda_runtime.h>

#include <climits>
#include <span>
#include <vector>

#include "core/status.hpp"
#include "cuda/stage/plan_count.cuh"
#include "cuda/stage/plan_entries.cuh"
#include "cuda/stage/plan_place.cuh"
#include "cuda/stage/plan_shared.cuh"
#include "cuda/stage/plan_tasks.cuh"
#include "cuda/stage/plan_wait.cuh"

namespace weft {
namespace {

__device__ __noinline__ void report_chunk(const PlanParams& launch, int32_t chunk_idx) {
  const Chunk& chunk = launch.scratch.chunks[chunk_idx];
  if (!claim(launch.report, chunk.fault)) return;
  const int32_t source = chunk_idx / launch.chunks_per_source;
  launch.report->own_call = launch.call;
  launch.report->rank = source;
  launch.report->value = chunk.value;
  if (chunk.fault == PlanFault::kIndex) {
    launch.report->token = chunk.bad_route / launch.plan.shape.top_k;
    launch.report->slot = chunk.bad_route % launch.plan.shape.top_k;
    launch.report->value = launch.topk_idx[source][chunk.bad_route];
  }
}

// The chunk whose fault the launch reports; in every thread of the CTA. Disagreement comes first, then a wrong number
// of tokens, then an index, in the order of sources and tokens.
__device__ __noinline__ int32_t faulty_chunk(const PlanParams& launch, int32_t* first) {
  if (thread_idx() == 0) *first = INT_MAX;
  __syncthreads();
  for_each(launch.num_chunks, [&](int32_t chunk) {
    const auto fault = static_cast<int32_t>(launch.scratch.chunks[chunk].fault);
    if (fault != static_cast<int32_t>(PlanFault::kNone)) atomicMin(first, fault * launch.num_chunks + chunk);
  });
  __syncthreads();
  return *first % launch.num_chunks;
}

// Every word and block count that the call's tasks and stages count up from zero, and the ranks of the experts. By all
// warps but the first, which waits for the CTA's first source meanwhile.
__device__ void clear_counters(const PlanParams& launch, const PlanShared& shared) {
  constexpr int32_t kThreads = kPlanThreads - 32;
  const int32_t thread = thread_idx() - 32;
  const int64_t first = int64_t{cta_idx()} * kThreads + thread;
  const int64_t stride = int64_t{num_ctas()} * kThreads;
  const LocalFlags& flags = launch.flags;
#pragma unroll 1
  for (int64_t n = first; n < kNumBanks * flags.words_per_bank + 1; n += stride) flags.words[n] = 0;
#pragma unroll 1
  for (int64_t n = first; n < launch.plan.shape.max_blocks(); n += stride) launch.scratch.block_counts[n] = 0;
#pragma unroll 1
  for (int32_t expert = thread; expert < launch.plan.shape.num_experts; expert += kThreads) {
    shared.rank_of[expert] = expert / launch.num_local_experts;
  }
}

// At all peers at once, by one warp: each arrival waits until this rank's memory is in order.
__device__ __noinline__ void arrive_at_peers(const PlanParams& launch) {
  const int32_t rank = launch.plan.shape.ep_rank;
  const uint32_t epoch = launch_epoch(launch);
  DeviceMemory memory = plan_memory(launch);
  for (int32_t peer = lane_idx(); peer < launch.plan.shape.ep_size; peer += 32) {
    if (peer != rank) arrive_at(memory, launch.controls, rank, peer, epoch, launch.call);
  }
}

// All ranks end this launch, and each must have read what the others brought before it may be written again; by one
// thread.
__device__ __noinline__ void drain(const PlanParams& launch) {
  const uint32_t epoch = launch_epoch(launch);
  const LayerShape& shape = launch.plan.shape;
  DeviceMemory memory = plan_memory(launch);
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    memory.release(&launch.controls[peer]->pulls_done[shape.ep_rank], epoch, Scope::kSystem);
  }
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    const WaitSite site{WaitTask::kPlan, -1, FlagKind::kPullsDone, -1, peer};
    const uint32_t* done = &launch.controls[shape.ep_rank]->pulls_done[peer];
    if (!wait_or_report(launch, done, epoch, Scope::kSystem, site)) return;
  }
}

template <int32_t kRanks>
__global__ void __launch_bounds__(kPlanThreads, 2)
    plan_kernel(const __grid_constant__ Together<PlanParams, kRanks> ranks) {
  const PlanParams& launch = own_params(ranks);
  extern __shared__ __align__(16) int32_t shared_words[];
  const LayerShape& shape = launch.plan.shape;
  const PlanShared shared(shared_words, shape.num_experts);
  const bool leads = cta_idx() == 0 && thread_idx() == 0;
  if (leads) launch.scratch.state->ready = 0;
  if (cta_idx() == 0 && warp_idx() == kPlanWarps - 1) arrive_at_peers(launch);

  if (warp_idx() > 0) clear_counters(launch, shared);
#pragma unroll 1
  for (int32_t chunk = cta_idx(); chunk < launch.num_chunks; chunk += num_ctas()) {
    const bool open = thread_idx() != 0 || open_chunk(launch, chunk, shared.chunk);
    if (!__syncthreads_and(open)) return;
    count_chunk(launch, shared, chunk);
  }
  if (!pass_point(launch, 0)) return;

#pragma unroll 1
  for (int32_t chunk = cta_idx(); chunk < max_of(num_ctas(), launch.num_chunks); chunk += num_ctas()) {
    lay_out_chunk(launch, shared, chunk);
    if (shared.rows[shape.num_experts] > 0) {
      const int32_t faulty = faulty_chunk(launch, shared.sums);
      const PlanFault fault = launch.scratch.chunks[faulty].fault;
      if (leads) report_chunk(launch, faulty);
      if (fault != PlanFault::kIndex) {
        // Every rank sees the same calls and numbers of tokens, so all of them end here or none.
        if (!leads) return;
        if (fault == PlanFault::kNumTokens) drain(launch);
        finish_launch(launch, launch_epoch(launch), 1);
        return;
      }
    }
    if (chunk >= launch.num_chunks) break;  // a CTA without a chunk goes on with the tables of no chunk
    write_segments(launch, shared, chunk);
    write_padding(launch, shared, chunk);
    place_chunk(launch, shared, chunk);
  }
  write_tasks(launch, shared);
  if (!pass_point(launch, 1)) return;

  write_route_counts(launch, shared);
  list_entries(launch, shared);
  if (!pass_point(launch, 2)) return;

  link_entries(launch, shared);
  if (!leads) return;
  const uint32_t epoch = launch_epoch(launch);
  *launch.scratch.state = {1, epoch, static_cast<int32_t>(*launch.num_tokens[shape.ep_rank])};
  finish_launch(launch, epoch + static_cast<uint32_t>(*shared.num_passes) - 1, kNumGridBarriers);
}

void check(cudaError_t error, const char* what) {
  require(error == cudaSuccess, WEFT_INTERNAL, what, " failed: ", cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr name) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

void load_plan() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, plan_kernel<1>), "cannot load the plan kernel");
  check(cudaFuncGetAttributes(&attributes, plan_kernel<kMaxCudaRanks>), "cannot load the plan kernel");
}

void launch_plan(std::span<const PlanLaunch> ranks, int32_t num_sms, cudaStream_t stream) {
  const LayerShape& shape = ranks[0].plan.shape;
  const int all_sms = attribute(cudaDevAttrMultiProcessorCount);
  const int num_ctas = min_of(num_sms > 0 ? min_of(int{num_sms}, all_sms) : all_sms, int{kMaxPlanCtas});
  int num_stages = 0;
  std::vector<PlanParams> params;
  for (const PlanLaunch& launch : ranks) {
    num_stages = max_of(num_stages, static_cast<int>(task_bounds(shape, launch.choice).num_stages()));
    PlanParams own{launch, shape.num_local_experts(), max_of(1, num_ctas / shape.ep_size), 0};
    own.num_chunks = own.chunks_per_source * shape.ep_size;
    params.push_back(own);
  }
  const int shared_bytes = PlanShared::num_words(shape.num_experts, num_stages) * static_cast<int>(sizeof(int32_t));
  const int most_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  require(shared_bytes <= most_bytes, WEFT_UNSUPPORTED, "num_experts is ", shape.num_experts, ", whose counts need ",
          shared_bytes, " bytes of shared memory; this device has ", most_bytes, " a block, enough for about ",
          most_bytes / ((kPlanWarps + PlanShared::kTables) * static_cast<int>(sizeof(int32_t))), " experts");

  with_together(std::span<const PlanParams>(params), [&]<int32_t kRanks>(const Together<PlanParams, kRanks>& launch) {
    check(cudaFuncSetAttribute(plan_kernel<kRanks>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "cudaFuncSetAttribute");
    const dim3 grid(static_cast<unsigned>(num_ctas), static_cast<unsigned>(ranks.size()));
    plan_kernel<kRanks><<<grid, kPlanThreads, static_cast<size_t>(shared_bytes), stream>>>(launch);
    check(cudaGetLastError(), "launch of the plan kernel");
  });
}

}  // namespace weft
