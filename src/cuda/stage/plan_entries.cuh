// Third and fourth stage of the plan kernel: entries and the order in which they complete, from prefix sums over the
// records of the pool's rows; then, once every entry has its number, the entries themselves and what points to them.
#pragma once

#include <cstdint>

#include "cuda/stage/plan_place.cuh"
#include "cuda/stage/plan_shared.cuh"

namespace weft {

// Of the pool's rows before a place: entries that begin, rows of those, entries that end.
struct EntryCounts {
  int32_t begins = 0;
  int32_t rows = 0;
  int32_t ends = 0;

  // Packed for sums over one CTA's rows at a time.
  static constexpr int32_t kSumBits = 16;
  __device__ static uint64_t pack(const RowBits& bits) {
    const uint64_t rows = bits.head ? static_cast<uint64_t>(bits.num_rows) : 0;
    return rows << 2 * kSumBits | uint64_t{bits.tail} << kSumBits | uint64_t{bits.head};
  }
  __device__ void add(uint64_t packed) {
    begins += static_cast<int32_t>(packed & 0xFFFFU);
    ends += static_cast<int32_t>(packed >> kSumBits & 0xFFFFU);
    rows += static_cast<int32_t>(packed >> 2 * kSumBits);
  }
};

// What the blocks before `end_block` hold, in every thread of the CTA.
__device__ inline EntryCounts entries_before(const PlanParams& launch, const PlanShared& shared, int32_t end_block) {
  int32_t sums[3] = {};
#pragma unroll 4
  for (int32_t block = thread_idx(); block < end_block; block += kPlanThreads) {
    const BlockCount count = BlockCount::unpack(launch.scratch.block_counts[block]);
    sums[0] += count.begins;
    sums[1] += count.rows;
    sums[2] += count.ends;
  }
  sum_over_cta(shared, sums);
  return {sums[0], sums[1], sums[2]};
}

// Writes row_route, row_begin, row_weight and pass_entry_begin; of an entry its number in row_entry of its first row,
// and in the records of its first and last row where its fan_rows begin and its place in combine_order. CTAs take
// neighbouring blocks, threads four neighbouring rows.
__device__ inline void list_entries(const PlanParams& launch, const PlanShared& shared) {
  constexpr int32_t kRows = 4;
  constexpr int32_t kTileRows = kPlanThreads * kRows;
  static_assert(kTileRows < 1 << EntryCounts::kSumBits && kBlockRows % kRows == 0);
  const Plan& plan = launch.plan;
  RowRecord* records = launch.scratch.records;
  const int32_t num_blocks = shared.local_begin[launch.num_local_experts];
  const int32_t blocks_a_cta = max_of(1, ceil_div(num_blocks, num_ctas()));
  const int32_t begin_block = min_of(cta_idx() * blocks_a_cta, num_blocks);
  const int32_t end_row = min_of(begin_block + blocks_a_cta, num_blocks) * kBlockRows;
  RowRecord record[kRows];
  const auto load = [&](int32_t first) {
#pragma unroll
    for (int32_t n = 0; n < kRows; ++n) {
      record[n] = first < end_row ? records[first + n] : RowRecord{kPaddingToken, 0, 0, 0.0F};
    }
  };
  load(begin_block * kBlockRows + thread_idx() * kRows);  // on its way while the blocks before are added up
  EntryCounts before_tile = entries_before(launch, shared, begin_block);

#pragma unroll 1
  for (int32_t tile = begin_block * kBlockRows; tile < end_row; tile += kTileRows) {
    const int32_t first = tile + thread_idx() * kRows;
    uint64_t own = 0;
#pragma unroll
    for (int32_t n = 0; n < kRows; ++n) own += EntryCounts::pack(RowBits::unpack(record[n].packed));
    const uint64_t inclusive = inclusive_sum(own);
    if (lane_idx() == 31) shared.warp_sums[warp_idx()] = inclusive;
    __syncthreads();
    uint64_t before_own = inclusive - own;
    uint64_t whole_tile = 0;
#pragma unroll 4
    for (int32_t warp = 0; warp < kPlanWarps; ++warp) {
      const uint64_t sum = shared.warp_sums[warp];
      before_own += warp < warp_idx() ? sum : 0;
      whole_tile += sum;
    }
    EntryCounts counts = before_tile;
    counts.add(before_own);
    before_tile.add(whole_tile);
    __syncthreads();  // warp_sums may be written again
    if (first >= end_row) continue;
    const int32_t block = first / kBlockRows;
    if (first % kBlockRows == 0 && block % plan.shape.capacity_blocks == 0) {
      plan.pass_entry_begin[block / plan.shape.capacity_blocks] = counts.begins;
    }
    int32_t entry[kRows];
    int32_t source_and_k[kRows];  // as in RouteRef
    uint32_t row_begin[kRows];
#pragma unroll
    for (int32_t n = 0; n < kRows; ++n) {
      const RowBits bits = RowBits::unpack(record[n].packed);
      source_and_k[n] = bits.source | bits.k << 16;
      const auto token = static_cast<uint32_t>(bits.source * plan.shape.max_tokens + record[n].token);
      row_begin[n] = token * static_cast<uint32_t>(plan.shape.hidden / 8);
      entry[n] = -1;
      if (bits.head) {
        records[first + n].link = counts.rows;
        counts.rows += bits.num_rows;
        entry[n] = counts.begins++;
      }
      if (bits.tail) records[first + n].weight = __int_as_float(counts.ends++);
    }
    auto* routes = reinterpret_cast<int4*>(plan.row_route + first);
    routes[0] = {record[0].token, source_and_k[0], record[1].token, source_and_k[1]};
    routes[1] = {record[2].token, source_and_k[2], record[3].token, source_and_k[3]};
    *reinterpret_cast<float4*>(plan.row_weight + first) = {record[0].weight, record[1].weight, record[2].weight,
                                                           record[3].weight};
    *reinterpret_cast<int4*>(plan.row_entry + first) = {entry[0], entry[1], entry[2], entry[3]};
    *reinterpret_cast<uint4*>(launch.scratch.row_begin + first) = {row_begin[0], row_begin[1], row_begin[2],
                                                                   row_begin[3]};
    load(first + kTileRows);
  }

  // The passes behind this rank's last block, and the end of the last pass.
  if (cta_idx() != max_of(0, num_blocks - 1) / blocks_a_cta) return;
  const int32_t first_empty = ceil_div(num_blocks, plan.shape.capacity_blocks);
  for_each(*shared.num_passes + 1 - first_empty,
           [&](int32_t n) { plan.pass_entry_begin[first_empty + n] = before_tile.begins; });
}

// Writes entries, fan_rows, combine_order and the rest of row_entry. Most entries begin in the first experts: warps of
// all CTAs take turns.
__device__ inline void link_entries(const PlanParams& launch, const PlanShared& shared) {
  constexpr int32_t kGroups = 3;  // of 32 rows, that a warp holds at once
  const Plan& plan = launch.plan;
  const RowRecord* records = launch.scratch.records;
  const int32_t num_rows = shared.local_begin[launch.num_local_experts] * kBlockRows;
  const int32_t stride = num_ctas() * kPlanThreads;
  const int32_t first_row = (warp_idx() * num_ctas() + cta_idx()) * 32 + lane_idx();
#pragma unroll 1
  for (int32_t first = first_row; first < num_rows; first += kGroups * stride) {
    RowRecord record[kGroups];
    int32_t entry_of[kGroups];
    int32_t fan_begin[kGroups];
#pragma unroll
    for (int32_t n = 0; n < kGroups; ++n) {
      const int32_t row = first + n * stride;
      record[n] = row < num_rows ? records[row] : RowRecord{kPaddingToken, 0, 0, 0.0F};
    }
#pragma unroll
    for (int32_t n = 0; n < kGroups; ++n) {
      const int32_t row = first + n * stride;
      if (record[n].packed == 0) continue;
      const int32_t head_row = RowBits::unpack(record[n].packed).head ? row : record[n].link;
      entry_of[n] = plan.row_entry[head_row];
      fan_begin[n] = records[head_row].link;
    }
#pragma unroll
    for (int32_t n = 0; n < kGroups; ++n) {
      const int32_t row = first + n * stride;
      if (record[n].packed == 0) continue;
      const RowBits bits = RowBits::unpack(record[n].packed);
      plan.fan_rows[fan_begin[n] + bits.ordinal] = row;
      if (bits.tail) plan.combine_order[__float_as_int(record[n].weight)] = entry_of[n];
      if (bits.head) {
        plan.entries[entry_of[n]] = {record[n].token, bits.source, fan_begin[n], bits.num_rows, bits.slot};
      } else {
        plan.row_entry[row] = entry_of[n];
      }
    }
  }
}

}  // namespace weft
