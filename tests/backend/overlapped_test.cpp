// The overlapped run - threads, tickets, flags - gives the bits of the phased one, whatever the timing and the number
// of workers. Under the thread sanitizer this is also the test that the flags order every access.
#include "backend/layer_harness.hpp"

namespace weft::testing {
namespace {

class EveryRouting : public ::testing::TestWithParam<cases::NamedRouting> {};

TEST_P(EveryRouting, OverlappedEqualsPhasedBitwise) {
  LayerCase layer{GetParam().make(), 24, 16};
  const LayerInputs inputs = make_inputs(layer, 1);
  const auto phased = run_layer(layer, inputs);
  layer.schedule = WEFT_SCHEDULE_OVERLAPPED;
  for (const int32_t num_workers : {1, 3}) {
    layer.num_workers = num_workers;
    expect_bitwise_equal(run_layer(layer, inputs), phased);
  }
}

// Thread counts beyond reason say nothing here.
std::vector<cases::NamedRouting> routings_for_threads() {
  std::vector<cases::NamedRouting> routings;
  for (auto& routing : cases::adversarial_routings()) {
    const bool small = routing.name != "ranks_64" && routing.name.find("uneven") == std::string::npos &&
                       routing.name.find("experts_") == std::string::npos;
    if (small || routing.name == "experts_straddle_passes") routings.push_back(std::move(routing));
  }
  return routings;
}

INSTANTIATE_TEST_SUITE_P(Routings, EveryRouting, ::testing::ValuesIn(routings_for_threads()),
                         [](const auto& test) { return test.param.name; });

TEST(Overlapped, RepeatsBitwiseInBf16WithRecomputation) {
  LayerCase layer{cases::uniform_routing({16, 4, {120, 200, 0, 60}, 6}, 41, 0.1), 64, 128, WEFT_PRECISION_BF16};
  layer.schedule = WEFT_SCHEDULE_OVERLAPPED;
  layer.save = WEFT_SAVE_INPUTS;
  layer.spoil_workspace = true;
  const LayerInputs inputs = make_inputs(layer, 2);
  const auto first = run_layer(layer, inputs);
  for (int repeat = 0; repeat < 5; ++repeat) expect_bitwise_equal(run_layer(layer, inputs), first);
}

}  // namespace
}  // namespace weft::testing
