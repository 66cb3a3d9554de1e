// What building a routing plan costs one core, over tokens a rank (the shape of the foundation's target is 16384 tokens
// x top-8 x 128 experts x 8 ranks: under 20 ms), with the fitted complexity; and over the number of passes.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "cases/planned.hpp"

namespace {

using weft::cases::RoutingSizes;

constexpr int32_t kExperts = 128;
constexpr int32_t kTopK = 8;
constexpr int32_t kRanks = 8;

weft::cases::Routing uniform(int64_t num_tokens, int32_t capacity_blocks) {
  return weft::cases::uniform_routing({kExperts, kTopK, std::vector<int64_t>(kRanks, num_tokens), capacity_blocks}, 1);
}

void time_build(benchmark::State& state, const weft::cases::Routing& routing) {
  const weft::cases::RankPlan plan(routing, 0, 2048, 768);
  const weft::RoutingInputs inputs = weft::cases::inputs_of(routing);
  for (auto _ : state) {
    weft::build_plan(*plan, inputs);
    benchmark::ClobberMemory();
  }
  state.counters["routes"] = static_cast<double>(routing.num_routes());
  state.counters["passes"] = *plan->num_passes;
}

void build_plan_by_tokens(benchmark::State& state) {
  time_build(state, uniform(state.range(0), 1 << 20));
  state.SetComplexityN(state.range(0) * kTopK);
}
BENCHMARK(build_plan_by_tokens)
    ->RangeMultiplier(2)
    ->Range(1024, 65536)
    ->Complexity(benchmark::oN)
    ->Unit(benchmark::kMillisecond);

void build_plan_by_capacity_blocks(benchmark::State& state) {
  time_build(state, uniform(16384, static_cast<int32_t>(state.range(0))));
}
BENCHMARK(build_plan_by_capacity_blocks)->Arg(1280)->Arg(128)->Arg(1)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
