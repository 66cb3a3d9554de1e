// Layout: one carve measures and places alike, arrays lie apart and aligned, and sizes hold beyond 32 bits.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "layout/carver.hpp"
#include "layout/shape.hpp"
#include "layout/symmetric.hpp"
#include "numeric/bf16.hpp"
#include "protocol/flags.hpp"
#include "schedule/plan.hpp"

namespace weft {
namespace {

// Array bytes by address. A base that nothing is ever read from lets the sizes exceed the machine's memory.
struct Extent {
  const char* name;
  uintptr_t begin;
  int64_t bytes;
};
template <class T>
Extent extent(const char* name, const T* data, int64_t count) {
  return {name, reinterpret_cast<uintptr_t>(data), count * static_cast<int64_t>(sizeof(T))};
}
const auto kBase = uintptr_t{1} << 44;

std::vector<Extent> carve_all(Carver& carver, const LayerShape& shape) {
  const int64_t table = int64_t{shape.ep_size} * shape.num_experts;
  const int64_t routes = shape.max_tokens * shape.top_k;
  const int64_t values = shape.max_tokens * shape.hidden;
  const Plan plan = carve_plan(carver, shape);
  const auto data = carve_symmetric_data<Bf16>(carver, shape);
  const SymmetricFlags arrived = carve_symmetric_flags(carver, shape);
  const LocalFlags flags = carve_local_flags(carver, shape);
  return {
      extent("num_passes", plan.num_passes, 1),
      extent("route_counts", plan.route_counts, table),
      extent("segment_begin", plan.segment_begin, table),
      extent("cursor", plan.cursor, shape.num_experts),
      extent("expert_rows", plan.expert_rows, shape.num_local_experts()),
      extent("expert_block_begin", plan.expert_block_begin, shape.num_local_experts() + 1),
      extent("route_row", plan.route_row, shape.max_routes()),
      extent("row_route", plan.row_route, shape.max_pool_rows()),
      extent("row_weight", plan.row_weight, shape.max_pool_rows()),
      extent("row_entry", plan.row_entry, shape.max_pool_rows()),
      extent("entries", plan.entries, shape.max_routes()),
      extent("fan_rows", plan.fan_rows, shape.max_routes()),
      extent("combine_order", plan.combine_order, shape.max_routes()),
      extent("pass_entry_begin", plan.pass_entry_begin, shape.max_passes() + 1),
      extent("num_tokens", data.num_tokens, 1),
      extent("topk_idx", data.topk_idx, routes),
      extent("topk_weights", data.topk_weights, routes),
      extent("x", data.x, values),
      extent("dy", data.dy, values),
      extent("partial", data.partial, values * shape.slots_per_token()),
      extent("dtopk_weights", data.dtopk_weights, routes),
      extent("arrived", arrived.arrived, kMaxParts * shape.max_tokens * shape.slots_per_token()),
      extent("local flags", flags.words, kNumBanks * flags.words_per_bank + 1),
  };
}

std::vector<LayerShape> shapes() {
  return {
      {1, 1, 1, 1, 1, 0, 1, 1},
      {128, 128, 8, 2, 4, 3, 7, 2},
      {2880, 768, 60, 6, 4, 1, 333, 5},
      {2048, 768, 128, 8, 8, 7, 16384, 1280},
      {7168, 2048, 896, 16, 64, 63, 16384, 4096},    // x: 234 MB a rank, partial rows: 3.8 GB
      {16384, 4608, 512, 32, 64, 0, 262144, 81920},  // partial rows: 275 GB
  };
}

TEST(Layout, MeasuringAndPlacingAgree) {
  for (const LayerShape& shape : shapes()) {
    Carver measure;
    for (const Extent& array : carve_all(measure, shape)) ASSERT_EQ(array.begin, 0u) << array.name;
    Carver place(reinterpret_cast<void*>(kBase));
    carve_all(place, shape);
    ASSERT_EQ(measure.used(), place.used());
    ASSERT_EQ(measure.used() % kArrayAlignment, 0);
  }
}

TEST(Layout, ArraysLieApartAlignedAndInside) {
  for (const LayerShape& shape : shapes()) {
    Carver carver(reinterpret_cast<void*>(kBase));
    uintptr_t end = kBase;
    for (const Extent& array : carve_all(carver, shape)) {
      ASSERT_EQ(array.begin % kArrayAlignment, 0u) << array.name;
      ASSERT_GE(array.begin, end) << array.name;
      ASSERT_LT(array.begin - end, static_cast<uintptr_t>(kArrayAlignment)) << array.name;
      end = array.begin + static_cast<uintptr_t>(array.bytes);
    }
    ASSERT_LE(end, kBase + static_cast<uintptr_t>(carver.used()));
  }
}

// The bytes of large layers, from their shapes alone: beyond 2^31 and 2^32, and beyond 2^31 elements.
TEST(Layout, SizesHoldBeyond32Bits) {
  const LayerShape shape{4096, 1536, 128, 8, 8, 0, 131072, 10240};
  EXPECT_EQ(shape.max_routes(), int64_t{8} * 131072 * 8);
  EXPECT_EQ(shape.max_blocks(), 65536 + 16);
  EXPECT_EQ(shape.max_pool_rows(), (int64_t{65536} + 16) * 128);
  EXPECT_EQ(shape.capacity_rows(), 1310720);
  Carver carver;
  carve_symmetric_data<Bf16>(carver, shape);
  const int64_t row_bytes = 4096 * 2;
  const int64_t staged = 2 * 131072 * row_bytes;
  const int64_t partial = 131072 * 8 * row_bytes;
  EXPECT_EQ(carver.used(), 256 + 3 * (131072 * 8 * 4) + staged + partial);
  EXPECT_GT(carver.used(), int64_t{1} << 33);

  const LayerShape wide{16384, 4608, 512, 32, 64, 0, 262144, 1 << 30};
  EXPECT_EQ(wide.capacity_rows(), int64_t{1} << 37);
  EXPECT_EQ(wide.max_routes(), int64_t{64} * 262144 * 32);
}

TEST(Layout, RouteOffsetsHoldBeyond32Bits) {
  Plan plan{};
  plan.shape = {16384, 4608, 512, 32, 64, 0, 1 << 22, 4096};
  EXPECT_EQ(plan.route_offset(63, (1 << 22) - 1), (int64_t{63} * (1 << 22) + (1 << 22) - 1) * 32);
  plan.shape.capacity_blocks = 1 << 30;
  EXPECT_EQ(plan.physical_row(2147483647), 2147483647);
}

// Memory is a function of the configuration: neither the rank nor anything routed enters it.
TEST(Layout, SizesAreTheSameOnEveryRank) {
  LayerShape shape{2048, 768, 128, 8, 8, 0, 4096, 320};
  Carver first;
  carve_all(first, shape);
  for (shape.ep_rank = 1; shape.ep_rank < shape.ep_size; ++shape.ep_rank) {
    Carver carver;
    carve_all(carver, shape);
    ASSERT_EQ(carver.used(), first.used());
  }
}

TEST(Layout, BanksOfLocalFlagsCoverTheirWordsOnce) {
  const LayerShape shape{128, 128, 8, 2, 4, 0, 7, 5};
  std::vector<uint32_t> memory(256, 0);
  Carver carver(memory.data());
  const LocalFlags flags = carve_local_flags(carver, shape);
  for (int32_t pass = 0; pass < 4; ++pass) {
    const PassFlags& bank = flags.of_pass(pass);
    for (uint32_t* word : {bank.matrix_ticket, bank.comm_ticket, bank.pulled, bank.workers_done}) ++*word;
    for (int32_t block = 0; block < shape.capacity_blocks; ++block) {
      ++bank.rows_ready[block];
      ++bank.z_ready[block];
      ++bank.mid_ready[block];
      for (int32_t part = 0; part < kMaxParts; ++part) ++bank.out_ready[part * shape.capacity_blocks + block];
    }
    const int64_t begin = flags.bank_words(pass) - flags.words;
    for (int64_t word = 0; word < kNumBanks * flags.words_per_bank; ++word) {
      const bool inside = word >= begin && word < begin + flags.words_per_bank;
      ASSERT_EQ(flags.words[word], static_cast<uint32_t>(pass / 2 + (inside || pass % 2 == 1 ? 1 : 0)))
          << "pass " << pass << ", word " << word;
    }
  }
  EXPECT_EQ(*flags.pass_open, 0u);
  EXPECT_EQ(flags.pass_open, flags.words + kNumBanks * flags.words_per_bank);
}

}  // namespace
}  // namespace weft
