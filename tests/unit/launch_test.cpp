// What the host makes for a launch on a GPU: the words of what a device reports, and the layout of the workspace.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "cuda/launch/fault.hpp"
#include "cuda/launch/roll.hpp"
#include "cuda/launch/runtime.hpp"
#include "cuda/launch/workspace.hpp"

namespace weft {
namespace {

constexpr LayerShape kShape{2048, 768, 128, 8, 8, 3, 16384, 1296};

std::string disagreement(const Call& own, const Call& peer) {
  PlanReport report{};
  report.fault = PlanFault::kDisagreement;
  report.own_call = own;
  report.rank = 5;
  report.value = encode_call(peer);
  const std::string text = describe(report, kShape);
  return text.substr(0, text.find(';'));
}

TEST(Fault, AFirstCallInsideACaptureSaysWhatToDo) {
  try {
    check_cuda(cudaErrorStreamCaptureUnsupported, "cannot allocate");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), WEFT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("run the same call once before"), std::string::npos) << error.what();
  }
}

TEST(Fault, ADisagreementNamesWhatBothRan) {
  constexpr uint32_t kLayer = 0xABCDEF12;
  const Call forward{CallKind::kForward, kLayer};
  const Call backward{CallKind::kBackward, kLayer << 2 | 3};
  EXPECT_EQ(disagreement(forward, backward), "ranks disagree: rank 3 ran a forward, rank 5 a backward");
  EXPECT_EQ(disagreement(backward, forward), "ranks disagree: rank 3 ran a backward, rank 5 a forward");
  EXPECT_EQ(disagreement(forward, {CallKind::kForward, 1}),
            "ranks disagree: rank 3 ran a forward, rank 5 one of another layer");
  EXPECT_EQ(disagreement(backward, {CallKind::kBackward, 1 << 2 | 3}),
            "ranks disagree: rank 3 ran a backward, rank 5 one of another layer");
  EXPECT_EQ(disagreement(backward, {CallKind::kBackward, kLayer << 2 | 1}),
            "ranks disagree: rank 3 ran a backward, rank 5 one for other gradients (dx, dtopk_weights)");
  EXPECT_EQ(disagreement(backward, {CallKind::kNextPass, 0}),
            "ranks disagree: rank 3 ran a backward, rank 5 something else");
}

TEST(Fault, InputsAreNamedByRankAndPlace) {
  PlanReport report{};
  report.rank = 5;
  report.fault = PlanFault::kNumTokens;
  report.value = 20000;
  EXPECT_EQ(describe(report, kShape).find("rank 5 brought 20000 tokens; allowed: 0 to max_tokens = 16384;"), 0U);
  report.fault = PlanFault::kIndex;
  report.token = 7;
  report.slot = 1;
  report.value = 128;
  EXPECT_EQ(describe(report, kShape).find("topk_idx of rank 5 at token 7, slot 1 is 128; allowed: 0 to 127, or -1"),
            0U);
}

Workspace carve_at_some_place(const LayerShape& shape, Direction direction) {
  Carver carver(reinterpret_cast<void*>(uintptr_t{1} << 40));  // nothing is read or written there
  return carve_workspace(carver, shape, direction);
}
int64_t bytes_of(const LayerShape& shape, Direction direction) {
  Carver carver;
  carve_workspace(carver, shape, direction);
  return carver.used();
}

// A backward finds a forward's rows where the forward has put them.
TEST(Workspace, OfABackwardBeginsWithThatOfAForward) {
  const Workspace forward = carve_at_some_place(kShape, Direction::kForward);
  const Workspace backward = carve_at_some_place(kShape, Direction::kBackward);
  EXPECT_EQ(forward.x, backward.x);
  EXPECT_EQ(forward.act, backward.act);
  EXPECT_EQ(forward.rows, backward.rows);
  EXPECT_EQ(forward.token_sum, backward.token_sum);
  const auto end = reinterpret_cast<uintptr_t>(backward.backward_table.tasks);
  EXPECT_EQ(end, (uintptr_t{1} << 40) + static_cast<uintptr_t>(bytes_of(kShape, Direction::kForward)));
}

// The formulas of docs/guide.md; the rest is the table of tasks.
TEST(Workspace, TakesTheBytesThatTheGuideSays) {
  const int64_t rows = kShape.capacity_rows();
  const int64_t hidden = kShape.hidden;
  const int64_t intermediate = kShape.intermediate;
  LayerShape one_pass = kShape;
  one_pass.capacity_blocks = static_cast<int32_t>(kShape.max_blocks());
  const auto table_bytes = [](const LayerShape& shape) {
    Carver carver;
    carve_task_table(carver, shape, backward_choice(kWholeBackward));
    return carver.used();
  };
  const auto extra = [&](const LayerShape& shape) {
    return bytes_of(shape, Direction::kBackward) - bytes_of(shape, Direction::kForward) - table_bytes(shape);
  };
  const int64_t carried = 24 * intermediate * hidden;
  const int64_t pulled = 2 * kShape.ep_size * kShape.max_tokens * hidden;
  EXPECT_EQ(extra(kShape), rows * (4 * intermediate + 4 * 3) + pulled + carried);
  EXPECT_EQ(extra(one_pass), one_pass.capacity_rows() * (4 * intermediate + 4 * 3) + pulled);

  LayerShape alone = one_pass;
  alone.ep_size = 1;
  alone.ep_rank = 0;
  alone.capacity_blocks = static_cast<int32_t>(alone.max_blocks());
  EXPECT_EQ(extra(alone), alone.capacity_rows() * (4 * intermediate + 4 * 3));
  EXPECT_EQ(carve_at_some_place(alone, Direction::kBackward).x, nullptr);
}

TEST(Workspace, KnowsItsLargestArrayOfRows) {
  EXPECT_EQ(most_row_bytes(kShape), 1296 * int64_t{128} * 2048 * 2);
  LayerShape many_ranks = kShape;
  many_ranks.capacity_blocks = 1;
  EXPECT_EQ(most_row_bytes(many_ranks), 8 * int64_t{16384} * 2048 * 2);
  many_ranks.max_tokens = 1 << 22;
  EXPECT_GT(most_row_bytes(many_ranks), kMostRowBytes);
}

TEST(Roll, LaunchesTheCallsOfItsRanksInOrder) {
  Roll<int> roll;
  const int calls[] = {10, 11, 12, 13};
  for (const int32_t rank : {3, 1, 2}) roll.join(rank, calls[rank]);
  std::vector<int> launched;
  roll.launch(0b1010, [&](const std::vector<const int*>& of_ranks) {
    for (const int* call : of_ranks) launched.push_back(*call);
  });
  EXPECT_EQ(launched, (std::vector<int>{11, 13}));
}

// Its memory may be somebody else's by now.
TEST(Roll, DoesNotLaunchTheCallOfARankThatHasLeft) {
  Roll<int> roll;
  const int call = 0;
  for (const int32_t rank : {0, 1}) roll.join(rank, call);
  roll.leave(1);
  try {
    roll.launch(0b11, [](const std::vector<const int*>&) { FAIL() << "launched"; });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), WEFT_STALLED);
    EXPECT_EQ(std::string(error.what()).find("rank 1 had waited for its deadline and left"), 0U) << error.what();
  }
  roll.join(1, call);
  bool launched = false;
  roll.launch(0b11, [&](const std::vector<const int*>&) { launched = true; });
  EXPECT_TRUE(launched) << "a rank that has come back";
}

TEST(Roll, ARankThatLeavesTooLateWaitsForTheLaunch) {
  Roll<int> roll;
  const int call = 0;
  roll.join(0, call);
  std::atomic<bool> launching{false};
  std::atomic<bool> launched{false};
  std::thread launcher([&] {
    roll.launch(0b1, [&](const std::vector<const int*>&) {
      launching = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      launched = true;
    });
  });
  while (!launching) std::this_thread::yield();
  roll.leave(0);
  EXPECT_TRUE(launched);
  launcher.join();
}

}  // namespace
}  // namespace weft
