// Loading: two warps of each CTA fill the ring of stages. Rows of tokens they gather (stage/gather.cuh), and one lane
// brings everything else by TMA. What makes up the operands of a kernel's tasks its Operands say:
//   tile(head)                            what is the same in all steps, derived from LoadTile
//   load_a(a, full, tile, step)           kBytesA, unless it is gathered
//   load_b(b, tile, step, half, load)     half of kBytesB; `load` is tma_load, or multicast
//   load_extra(a, b, full, tile, n)       stages behind the last step that the epilogue reads
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warp.cuh"
#include "cuda/stage/gather.cuh"
#include "cuda/stage/schedule.cuh"

namespace weft {

// Whether operand A is rows of tokens: with K along the row, or, of a weight gradient, along the rows.
enum class Gathered : int32_t { kNothing, kRows, kColumns };

struct LoadTile : TaskHead {
  int32_t num_steps;  // of K
  int32_t num_extra;
  Gathered gathered;
  const Bf16* tokens;  // where the first token's row begins, or the tile's columns of it
  int32_t first_row;   // gathered: of the pool, virtual; else physical
  int32_t last_row;    // gathered: the last that is no padding
};

// One warp of kLoadWarps; the first brings what comes by TMA. That of the cluster's first CTA asks for the next task, a
// few stages before it could load for it.
template <class Operands>
__device__ __forceinline__ void run_load(const Operands& operands, SharedTile& shared, uint32_t cta) {
  const bool is_first = threadIdx.x < 32;
  RingPosition<kTaskSlots> slot;
  RingPosition<kStages> stage;
  const auto want_task = [&] {
    if (cta == 0 && is_first && ptx::elect_one()) ptx::mbarrier_arrive(&shared.task_wanted);
  };
  want_task();
  for (;;) {
    const TaskHead head = take_task(shared, slot);
    __syncwarp();
    if (ptx::elect_one()) release_task(shared, slot);
    slot.advance();
    if (head.ends()) return;
    if (head.ends_pass()) {
      want_task();
      continue;
    }
    const auto tile = operands.tile(head);
    const int32_t want_step = max_of(0, tile.num_steps + tile.num_extra - kClaimStages);
    if (tile.num_steps == 0) want_task();
    ptx::fence_proxy_async();  // what TMA reads was written by ordinary or bulk stores of other SMs

    // Fills a stage when it is empty: `bring`, by one lane, by TMA; `gather_rows`, by all.
    const auto fill = [&](const auto& bring, const auto& gather_rows) {
      ptx::mbarrier_wait(&shared.stage_empty[stage.index], stage.phase ^ 1);
      __syncwarp();
      uint64_t* full = &shared.stage_full[stage.index];
      if (is_first && ptx::elect_one()) bring(shared.a[stage.index], shared.b[stage.index], full);
      __syncwarp();
      gather_rows(shared.a[stage.index]);
      ptx::copies_arrive(full);
      stage.advance();
    };
    const auto load_b = [&](uint8_t* b, uint64_t* full, int32_t step) {
      if (tile.shares_b) {
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
    };
    const auto fill_step = [&](int32_t step, const auto& gather_rows) {
      if (step == want_step) want_task();
      fill(
          [&](uint8_t* a, uint8_t* b, uint64_t* full) {
            const bool brings_a = tile.gathered == Gathered::kNothing;
            ptx::mbarrier_arrive_expect_tx(full, (brings_a ? kBytesA : 0) + kBytesB);
            if (brings_a) operands.load_a(a, full, tile, step);
            load_b(b, full, step);
          },
          gather_rows);
    };

    const uint32_t* row_begin = operands.params.row_begin;
    if (tile.gathered == Gathered::kNothing) {
      for (int32_t step = 0; step < tile.num_steps; ++step) fill_step(step, [](uint8_t*) {});
    } else if (tile.gathered == Gathered::kRows) {
      RunLookup<kBlockRows> rows;
      rows.begin(row_begin, tile.first_row);
      rows.pad(row_begin, tile.first_row, tile.last_row);
      for (int32_t step = 0; step < tile.num_steps; ++step) {
        fill_step(step, [&](uint8_t* a) { gather<1>(a, rows, tile.tokens + step * kTileK); });
      }
    } else if constexpr (Operands::kHasWgrads) {
      // A tile has 64 columns where H does not go further.
      const bool is_whole = tile.m_tile * kBlockRows + kTileK < operands.params.plan.shape.hidden;
      int32_t row = tile.first_row;
      RunLookup<kTileK> next;
      if (tile.num_steps > 0) next.begin(row_begin, row);
      for (int32_t step = 0; step < tile.num_steps; ++step, row += kTileK) {
        RunLookup<kTileK> rows = next;
        rows.pad(row_begin, row, tile.last_row);
        if (step + 1 < tile.num_steps) next.begin(row_begin, row + kTileK);
        fill_step(step, [&](uint8_t* a) {
          if (is_whole) {
            gather<2>(a, rows, tile.tokens);
          } else {
            gather<1>(a, rows, tile.tokens);
          }
        });
      }
    }
    for (int32_t n = 0; n < tile.num_extra; ++n) {
      fill([&](uint8_t* a, uint8_t* b, uint64_t* full) { operands.load_extra(a, b, full, tile, n); }, [](uint8_t*) {});
    }
  }
}

}  // namespace weft
