// The protocol under every interleaving: the real roles, gates and barrier on the model machine, in calls small enough
// to search whole, larger ones with a bound on preemptions, and walks through calls of many rows, workers and passes.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "protocol/stall.hpp"
#include "protocol/toy_barrier.hpp"
#include "protocol/toy_cases.hpp"

namespace weft::explore {
namespace {

using Layer = ToyLayer<ModelMemory>;

Layer make_layer(const ToyCase& toy) {
  return Layer(toy, [](const ModelMemory& memory, uint32_t) { return memory; });
}

void expect_pass(const Outcome& outcome) {
  EXPECT_EQ(outcome.verdict, Verdict::kPass) << verdict_name(outcome.verdict) << ": " << outcome.words;
  EXPECT_TRUE(outcome.complete) << "stopped after " << outcome.num_executions << " executions";
  testing::Test::RecordProperty("executions", std::to_string(outcome.num_executions));
  testing::Test::RecordProperty("states", std::to_string(outcome.num_states));
}

// Every interleaving with at most so many preemptions; -1: every one.
void search(const ToyCase& toy, int32_t max_preemptions, Grain grain = Grain::kSynchronisation) {
  Layer layer = make_layer(toy);
  layer.machine().grain = grain;
  Limits limits;
  limits.max_preemptions = max_preemptions;
  expect_pass(layer.explore(limits));
}

void walk(const ToyCase& toy, int32_t num_walks, Grain grain = Grain::kEveryAccess) {
  Layer layer = make_layer(toy);
  layer.machine().grain = grain;
  Limits limits;
  limits.random_walks = num_walks;
  expect_pass(layer.explore(limits));
}

TEST(Explorer, Forward) { search(one_pass(kForwardCall), kUnbounded); }
TEST(Explorer, Backward) { search(one_pass(kBackwardCall), kUnbounded); }
TEST(Explorer, BackwardForInputGradientsOnly) { search(one_pass(kInputGradientCall), kUnbounded); }
TEST(Explorer, BackwardForRouterGradientsOnly) { search(one_pass(kRouterGradientCall), kUnbounded); }
TEST(Explorer, BackwardForWeightGradientsOnly) { search(one_pass(kWeightGradientCall), kUnbounded); }
TEST(Explorer, ForwardThatCopiesRows) { search(with_row_copies(one_pass(kForwardCall)), kUnbounded); }
TEST(Explorer, CopiesThatLandAtAnyTime) { search(one_pass(kForwardCall), kUnbounded, Grain::kCopies); }
TEST(Explorer, AccessesAtAnyTime) { search(one_pass(kForwardCall), kEffort > 1 ? 1 : 0, Grain::kEveryAccess); }

TEST(Explorer, TwoLaunches) {
  search(two_launches(kForwardCall, kBackwardCall), kEffort > 1 ? 2 : 1);
  search(two_launches(kBackwardCall, kForwardCall), 1);
  search(two_launches(kWeightGradientCall, kWeightGradientCall), kEffort > 1 ? 2 : 1);
}

TEST(Explorer, ThreePasses) {
  search(three_passes(kForwardCall), kEffort > 1 ? 2 : 1);
  search(three_passes(kBackwardCall), 1);
  search(with_row_copies(three_passes(kForwardCall)), 1);
  search(with_row_copies(three_passes(kWeightGradientCall)), 1);
}

TEST(Explorer, ThreeRanks) {
  search(one_launch(kForwardCall, alike(3, {1, 1, 1}, {0, 2})), 1);
  search(one_launch(kBackwardCall, alike(3, {1, 0, 1}, {1, 2})), 1);
}

TEST(Explorer, OddRoutings) {
  const auto with_masked_token = [](int32_t rank, int64_t token, std::vector<int32_t>& experts) {
    if (rank == 1 || token == 0) experts = {3, kMaskedRoute};
  };
  const std::vector<cases::Routing> routings = {
      alike(2, {0, 0}, {0}),                                     // nothing at all
      alike(2, {0, 2}, {0, 1}),                                  // a rank without tokens
      alike(4, {1, 2}, {2, 3}),                                  // a rank without rows, two passes on the other
      alike(2, {1, 1}, {1, 1}),                                  // one expert twice
      cases::make_routing({4, 2, {2, 1}, 1}, with_masked_token)  // a token with masked routes only
  };
  for (const cases::Routing& routing : routings) {
    search(one_launch(kForwardCall, routing), 1);
    search(one_launch(kBackwardCall, routing), 1);
  }
}

// The debug path: one worker a rank, stage by stage.
TEST(Explorer, Phased) {
  search(with_workers(two_launches(kForwardCall, kBackwardCall), 1, 0), kUnbounded);
  search(with_workers(three_passes(kBackwardCall), 1, 0), kUnbounded);
}

// Two workers a role: nobody knows who claims what.
TEST(Explorer, SeveralWorkersARole) {
  search(with_workers(one_pass(kForwardCall), 1, 2), 0);
  search(with_workers(one_pass(kForwardCall), 2, 1), 0);
  walk(with_workers(one_pass(kForwardCall), 2, 2), 400 * kEffort);
  walk(with_workers(two_launches(kBackwardCall, kBackwardCall), 2, 2), 200 * kEffort);
  walk(with_workers(with_row_copies(three_passes(kBackwardCall)), 2, 2), 200 * kEffort);
}

// Several tiles a block, several pull and sum tasks, and routes that change from launch to launch.
TEST(Explorer, WalksThroughLargerCalls) {
  ToyCase toy;
  toy.hidden = 2 * kTileCols;
  toy.intermediate = 3 * kTileCols;
  toy.comm_workers = 2;
  toy.matrix_workers = 2;
  for (const uint32_t seed : {1U, 2U, 3U}) {
    toy.routings.push_back(cases::uniform_routing({4, 2, {20, 17}, 4}, seed, 0.2, 0.2));
    toy.calls.push_back(seed == 2 ? kBackwardCall : kForwardCall);
  }
  walk(toy, 40 * kEffort);
  toy.copies_rows = true;
  walk(toy, 20 * kEffort, Grain::kCopies);
}

// Experts of several blocks, one block a pass: their weight gradients are summed over the passes.
TEST(Explorer, WalksThroughStraddlingExperts) {
  ToyCase toy = one_launch(kBackwardCall, cases::routing_of_group_sizes({4, 2, {150, 120}, 1}, {200, 140, 129, 71}));
  toy.matrix_workers = 2;
  walk(toy, 20 * kEffort, Grain::kCopies);
}

TEST(Explorer, WalksWithThreeRanksOfThreeWorkers) {
  ToyCase toy = one_launch(kBackwardCall, cases::uniform_routing({6, 3, {4, 0, 5}, 1}, 5, 0.1));
  walk(with_workers(toy, 1, 2), 100 * kEffort);
  walk(with_workers(toy, 2, 1), 100 * kEffort);
}

TEST(Explorer, MeetingsWithAndWithoutRefusals) {
  constexpr CallKind kCreate = CallKind::kCreate;
  constexpr CallKind kRefuse = CallKind::kRefuse;
  expect_pass(ToyBarrier({{{kCreate, kCreate, kCreate}, {kCreate, kCreate, kCreate}, {kCreate, kCreate, kCreate}}})
                  .explore({}));
  expect_pass(ToyBarrier({{{kCreate, kRefuse, kCreate, kRefuse, kRefuse, kRefuse, kCreate},
                           {kCreate, kCreate, kCreate, kRefuse, kCreate, kRefuse, kCreate}}})
                  .explore({}));
  expect_pass(ToyBarrier({{{kRefuse, kCreate, kRefuse}, {kCreate, kCreate, kCreate}, {kRefuse, kRefuse, kCreate}}})
                  .explore({}));
}

// --- Ranks that stay away. A deadline passes only where nothing else can happen any more.

void expect_stall(const ToyCase& toy, const std::function<std::string(const Layer&)>& check) {
  Layer layer = make_layer(toy);
  layer.set_check(check);
  Limits limits;
  limits.max_preemptions = 1;
  limits.deadlines = true;
  expect_pass(layer.explore(limits));
}

TEST(Explorer, AllEndWhenARankNeverArrives) {
  ToyCase toy = one_launch(kForwardCall, alike(3, {1, 1, 1}, {0, 2}));
  toy.absent_rank = 2;
  expect_stall(toy, [](const Layer& layer) -> std::string {
    int32_t first_to_give_up = -1;
    for (size_t w = 0; w < layer.reports().size(); ++w) {
      if (layer.reports()[w].stalled && layer.reports()[w].aborted_by < 0) first_to_give_up = layer.rank_of(w);
    }
    for (size_t w = 0; w < layer.reports().size(); w += 2) {  // leaders
      const StallReport& report = layer.reports()[w];
      const int32_t rank = layer.rank_of(w);
      if (report.stalled != (rank != 2)) return words("rank ", rank, " should have stalled, or should not");
      if (rank == 2) continue;
      const std::string text = describe(report, rank, 1.5);
      const std::string end = rank == first_to_give_up ? " after the deadline of 1.5 s"
                                                       : words("; rank ", first_to_give_up, " had given up before");
      const std::string expected =
          words("rank ", rank, " stalled in forward: flag entry, written by rank 2, should be ", "1 and is 0", end);
      if (text.find(expected) != 0) return text + " (expected: " + expected + ")";
    }
    return "";
  });
}

TEST(Explorer, AllEndWhenARankStopsWorking) {
  ToyCase toy = one_pass(kForwardCall);
  toy.rank_without_matrix = 1;
  expect_stall(toy, [](const Layer& layer) -> std::string {
    const StallReport& waiting = layer.reports()[0];  // leader of rank 0
    const StallReport& broken = layer.reports()[2];   // leader of rank 1
    if (!waiting.stalled || waiting.site.flag != FlagKind::kArrived || waiting.site.peer != 1 ||
        waiting.site.flag_idx != 1 || waiting.site.task != WaitTask::kSumTokens) {
      return "rank 0: " + describe(waiting, 0, 1);
    }
    if (!broken.stalled || broken.site.flag != FlagKind::kOutReady || broken.site.task != WaitTask::kCombine) {
      return "rank 1: " + describe(broken, 1, 1);
    }
    return waiting.aborted_by < 0 || broken.aborted_by < 0 ? "" : "nobody gave up first";
  });
}

}  // namespace
}  // namespace weft::explore
