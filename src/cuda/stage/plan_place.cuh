// Second stage of the plan kernel: from the counts of all chunks, where each chunk's rows begin; then the pool row of
// every route, and for routes that fall on this rank the record of the row.
#pragma once

#include <cstdint>

#include "cuda/stage/plan_shared.cuh"
#include "schedule/routing.hpp"

namespace weft {

// RowRecord::packed of a valid row; 0 in a padding row.
struct RowBits {
  int32_t num_rows;  // of the row's entry
  int32_t ordinal;   // place of the row among them, in k order
  int32_t slot;      // of the entry
  int32_t source;
  int32_t k;
  bool head;  // the entry's first row in the pool
  bool tail;  // its last

  __device__ uint32_t pack() const {
    return static_cast<uint32_t>(num_rows | ordinal << 6 | slot << 11 | source << 17 | k << 23 | int32_t{head} << 28 |
                                 int32_t{tail} << 29);
  }
  __device__ static RowBits unpack(uint32_t packed) {
    const auto field = [&](int32_t shift, int32_t bits) {
      return static_cast<int32_t>(packed >> shift & ((1U << bits) - 1));
    };
    return {field(0, 6), field(6, 5), field(11, 6), field(17, 6), field(23, 5), field(28, 1) != 0, field(29, 1) != 0};
  }
};
static_assert(kMaxTopK <= 32 && kMaxRanks <= 64);

// PlanScratch::block_counts: of the entries that begin in a block their number and rows, of those that end their
// number. Atomic additions of integers: their order leaves no trace.
struct BlockCount {
  int32_t begins;
  int32_t ends;
  int32_t rows;

  __device__ uint32_t pack() const { return static_cast<uint32_t>(begins | ends << 8 | rows << 16); }
  __device__ static BlockCount unpack(uint32_t packed) {
    return {static_cast<int32_t>(packed & 0xFFU), static_cast<int32_t>(packed >> 8 & 0xFFU),
            static_cast<int32_t>(packed >> 16)};
  }
};
static_assert(kBlockRows < 1 << 8 && kBlockRows * kMaxTopK < 1 << 16);

// Adds up rows and base over the counts of all chunks, which every CTA reads: cheaper than a grid barrier. base counts
// the routes of the chunks that come before this one: from the expert's own rank on, going round the ranks.
__device__ inline void sum_chunks(const PlanParams& launch, const PlanShared& shared, int32_t chunk_idx) {
  const int32_t num_experts = launch.plan.shape.num_experts;
  const int32_t vectors = count_words(num_experts) / 4;
  const int32_t parts = max_of(1, kPlanThreads / vectors);  // threads that share four words
  for_each(parts * vectors, [&](int32_t item) {
    const int32_t part = item / vectors;
    const int32_t word = (item - part * vectors) * 4;
    const auto* counts = reinterpret_cast<const int4*>(launch.scratch.chunk_counts) + word / 4;
    int32_t first_chunk[4];
    int32_t rows[4] = {};
    int32_t before[4] = {};
#pragma unroll
    for (int32_t n = 0; n < 4; ++n) {
      first_chunk[n] = shared.rank_of[min_of(word + n, num_experts - 1)] * launch.chunks_per_source;
    }
#pragma unroll 3
    for (int32_t chunk = part; chunk < launch.num_chunks; chunk += parts) {
      const int4 vector = counts[int64_t{chunk} * vectors];
      const int32_t count[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int32_t n = 0; n < 4; ++n) {
        const bool behind_first = chunk >= first_chunk[n];
        const bool before_own = chunk < chunk_idx;
        const bool precedes = chunk_idx < first_chunk[n] ? behind_first || before_own : behind_first && before_own;
        rows[n] += count[n];
        before[n] += precedes ? count[n] : 0;
      }
    }
#pragma unroll
    for (int32_t n = 0; n < 4; ++n) {
      atomicAdd(&shared.rows[word + n], rows[n]);
      atomicAdd(&shared.base[word + n], before[n]);
    }
  });
}

// Where the counts of entries by block are gathered while a CTA places: in shared memory, and then added to all CTAs'
// counts a row of neighbours at a time, or at once if there are more blocks than words.
struct BlockCounts {
  uint32_t* counts;
  int32_t num_shared;  // 0: `counts` are all CTAs'
};
__device__ inline BlockCounts block_counts(const PlanParams& launch, const PlanShared& shared) {
  const int32_t num_blocks = shared.local_begin[launch.num_local_experts];
  const bool fits = num_blocks <= max_of(kPlanWarps * launch.plan.shape.num_experts, PlanShared::kLeastCountWords);
  return fits ? BlockCounts{shared.block_counts, num_blocks} : BlockCounts{launch.scratch.block_counts, 0};
}
__device__ inline void add_block_counts(const PlanParams& launch, const BlockCounts& own) {
  __syncthreads();
  for_each(own.num_shared, [&](int32_t block) {
    if (own.counts[block] != 0) atomicAdd(&launch.scratch.block_counts[block], own.counts[block]);
  });
  __syncthreads();  // the words may be used for something else
}

// Fills the tables by expert in shared memory for a chunk.
__device__ inline void lay_out_chunk(const PlanParams& launch, const PlanShared& shared, int32_t chunk_idx) {
  const LayerShape& shape = launch.plan.shape;
  const int32_t num_local = launch.num_local_experts;
  for_each(count_words(shape.num_experts), [&](int32_t word) { shared.rows[word] = shared.base[word] = 0; });
  __syncthreads();
  sum_chunks(launch, shared, chunk_idx);
  __syncthreads();
  if (warp_idx() == 0) {
    prefix_sums(shared.block_begin, shape.num_experts,
                [&](int32_t expert) { return ceil_div(shared.rows[expert], kBlockRows); });
    __syncwarp();
    int32_t passes = 1;
#pragma unroll 1
    for (int32_t rank = lane_idx(); rank < shape.ep_size; rank += 32) {
      const int32_t* block_begin = shared.block_begin + rank * num_local;
      passes = max_of(passes, passes_for(shape, block_begin[num_local] - block_begin[0]));
    }
    passes = __reduce_max_sync(kWholeWarp, passes);
    if (lane_idx() == 0) *shared.num_passes = passes;
  }
  __syncthreads();
  for_each(shape.num_experts, [&](int32_t expert) { shared.base[expert] += shared.first_row(expert, num_local); });
  const int32_t* own_begin = shared.block_begin + shape.ep_rank * num_local;
  for_each(num_local + 1, [&](int32_t local) { shared.local_begin[local] = own_begin[local] - own_begin[0]; });
  __syncthreads();
  for_each(block_counts(launch, shared).num_shared, [&](int32_t block) { shared.block_counts[block] = 0; });
  __syncthreads();
}

// The plan's tables by expert. A source's first chunk begins where the source's segments begin.
__device__ inline void write_segments(const PlanParams& launch, const PlanShared& shared, int32_t chunk_idx) {
  const Plan& plan = launch.plan;
  const LayerShape& shape = plan.shape;
  const int32_t source = chunk_idx / launch.chunks_per_source;
  if (chunk_idx == source * launch.chunks_per_source) {
    int32_t* segment_begin = plan.segment_begin + int64_t{source} * shape.num_experts;
    for_each(shape.num_experts, [&](int32_t expert) { segment_begin[expert] = shared.base[expert]; });
  }
  if (chunk_idx != 0) return;
  const int32_t num_local = launch.num_local_experts;
  for_each(num_local + 1, [&](int32_t local) {
    plan.expert_block_begin[local] = shared.local_begin[local];
    if (local < num_local) plan.expert_rows[local] = shared.rows[shape.ep_rank * num_local + local];
  });
  if (thread_idx() == 0) *plan.num_passes = *shared.num_passes;
}

// Once all segments are written: a source's routes to an expert end where the next source's begin, or with the expert's
// rows.
__device__ inline void write_route_counts(const PlanParams& launch, const PlanShared& shared) {
  const Plan& plan = launch.plan;
  const LayerShape& shape = plan.shape;
  const int32_t num_local = launch.num_local_experts;
  for (int32_t source = cta_idx(); source < shape.ep_size; source += num_ctas()) {
    const int32_t next = source + 1 < shape.ep_size ? source + 1 : 0;
    const int32_t* begin = plan.segment_begin + int64_t{source} * shape.num_experts;
    const int32_t* next_begin = plan.segment_begin + int64_t{next} * shape.num_experts;
    int32_t* counts = plan.route_counts + int64_t{source} * shape.num_experts;
    for_each(shape.num_experts, [&](int32_t expert) {
      const bool last = next == shared.rank_of[expert];
      counts[expert] =
          (last ? shared.first_row(expert, num_local) + shared.rows[expert] : next_begin[expert]) - begin[expert];
    });
  }
}

// The records behind an expert's last valid row; the chunks share the experts.
__device__ inline void write_padding(const PlanParams& launch, const PlanShared& shared, int32_t chunk_idx) {
  const int32_t num_local = launch.num_local_experts;
  for (int32_t local = chunk_idx; local < num_local; local += launch.num_chunks) {
    const int32_t rows = shared.rows[launch.plan.shape.ep_rank * num_local + local];
    const int32_t begin = shared.local_begin[local] * kBlockRows + rows;
    const int32_t end = shared.local_begin[local + 1] * kBlockRows;
    for_each(end - begin, [&](int32_t n) { launch.scratch.records[begin + n] = {kPaddingToken, 0, 0, 0.0F}; });
  }
}

// A route on its way to its pool row, one a lane: K neighbouring lanes hold a token's.
struct PlacedRoute {
  int32_t token;
  int32_t expert;
  int32_t row;  // -1 where it does not fall on this rank
  float weight;
};

// Finds out how the rows of a warp's tokens belong together and writes their records.
__device__ inline void write_records(const PlanParams& launch, const PlanShared& shared, int32_t source,
                                     uint32_t token_lanes, int32_t k, uint32_t* block_counts,
                                     const PlacedRoute& route) {
  const LayerShape& shape = launch.plan.shape;
  const bool local = route.row >= 0;
  const uint32_t local_lanes = __ballot_sync(kWholeWarp, local);
  if (local_lanes == 0) return;

  // The slot counts the ranks below this one that hold a route of the token: each by the first lane that names it.
  int32_t slot = 0;
  if (shape.ep_rank > 0) {
    const int32_t rank = route.expert == kMaskedRoute ? shape.ep_size : shared.rank_of[route.expert];
    const uint32_t alike = lanes_alike(rank, bits_below(shape.ep_size + 1)) & token_lanes;
    const bool names_lower = rank < shape.ep_rank && (alike & lanes_below()) == 0;
    slot = __popc(__ballot_sync(kWholeWarp, names_lower) & token_lanes);
  }
  uint32_t others = local ? local_lanes & token_lanes : 0;
  const int32_t pass = *shared.num_passes == 1 ? 0 : launch.plan.pass_of_row(route.row);
  int32_t head = route.row;
  int32_t tail = route.row;
  int32_t num_rows = 0;
  int32_t ordinal = 0;
#pragma unroll 1
  for (uint32_t left = __reduce_max_sync(kWholeWarp, static_cast<uint32_t>(__popc(others))); left > 0; --left) {
    const int32_t lane = max_of(0, __ffs(static_cast<int32_t>(others)) - 1);
    const int32_t other_row = __shfl_sync(kWholeWarp, route.row, lane);
    const int32_t other_pass = __shfl_sync(kWholeWarp, pass, lane);
    if (others != 0 && other_pass == pass) {
      head = min_of(head, other_row);
      tail = max_of(tail, other_row);
      ++num_rows;
      ordinal += lane < lane_idx() ? 1 : 0;
    }
    others &= others - 1;
  }
  if (!local) return;
  const bool is_head = route.row == head;
  const bool is_tail = route.row == tail;
  const RowBits bits{num_rows, ordinal, slot, source, k, is_head, is_tail};
  launch.scratch.records[route.row] = {route.token, head, bits.pack(), route.weight};
  const BlockCount count{is_head ? 1 : 0, is_tail ? 1 : 0, is_head ? num_rows : 0};
  if (is_head || is_tail) atomicAdd(&block_counts[route.row / kBlockRows], count.pack());
}

// Called by the whole CTA with the chunk laid out. Turns the ordinals in route_row into pool rows.
__device__ inline void place_chunk(const PlanParams& launch, const PlanShared& shared, int32_t chunk_idx) {
  constexpr int32_t kTokens = 2;  // whose routes a group of lanes holds at once
  const Plan& plan = launch.plan;
  const LayerShape& shape = plan.shape;
  const int32_t top_k = shape.top_k;
  const int32_t source = chunk_idx / launch.chunks_per_source;
  const bool counted_last = chunk_idx + num_ctas() >= launch.num_chunks;
  const Chunk& chunk = counted_last ? *shared.chunk : launch.scratch.chunks[chunk_idx];
  const float* topk_weights = launch.topk_weights[source];
  const int32_t* checked_idx = launch.scratch.topk_idx + plan.route_offset(source, 0);
  int32_t* route_row = plan.route_row + plan.route_offset(source, 0);

  const int32_t tokens_a_warp = 32 / top_k;
  const int32_t group = lane_idx() / top_k;
  const int32_t k = lane_idx() - group * top_k;
  const uint32_t token_lanes = (kWholeWarp >> (32 - top_k)) << (group * top_k);
  const int32_t tokens_a_step = kPlanWarps * tokens_a_warp;
  const int32_t num_local = launch.num_local_experts;
  const int32_t first_local = shape.ep_rank * num_local;
  const BlockCounts counts = block_counts(launch, shared);
  const int32_t end = chunk.end_token;
#pragma unroll 1
  for (int32_t step = chunk.begin_token; step < end; step += kTokens * tokens_a_step) {
    PlacedRoute routes[kTokens];
    int32_t ordinals[kTokens];
#pragma unroll
    for (int32_t n = 0; n < kTokens; ++n) {
      const int32_t token = step + n * tokens_a_step + warp_idx() * tokens_a_warp + group;
      const bool holds = group < tokens_a_warp && token < end;
      routes[n] = {token, holds ? checked_idx[token * top_k + k] : kMaskedRoute, -1, 0.0F};
      ordinals[n] = holds ? route_row[token * top_k + k] : -1;
    }
#pragma unroll
    for (int32_t n = 0; n < kTokens; ++n) {
      if (routes[n].expert == kMaskedRoute) continue;  // its -1 stands already
      const int32_t row = shared.base[routes[n].expert] + ordinals[n];
      const int32_t place = routes[n].token * top_k + k;
      route_row[place] = row;
      if (routes[n].expert < first_local || routes[n].expert >= first_local + num_local) continue;
      routes[n].row = row;
      routes[n].weight = topk_weights[place];
    }
#pragma unroll
    for (int32_t n = 0; n < kTokens; ++n) {
      write_records(launch, shared, source, token_lanes, k, counts.counts, routes[n]);
    }
  }
  add_block_counts(launch, counts);
}

}  // namespace weft
