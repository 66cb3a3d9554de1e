// The task order against its promises, over every routing, direction, selection of work and tiling: each tile once, no
// task before what it waits for, every counter ends at what its waiters expect, and each weight gradient is made in the
// passes that hold its expert's rows.
#include "schedule/task_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cases/planned.hpp"
#include "core/status.hpp"

namespace weft {
namespace {

using cases::RankPlan;
using cases::Routing;

constexpr int64_t kHidden = 384;
constexpr int64_t kIntermediate = 256;
// Odd and even numbers of columns of tiles, of both parts of down too.
constexpr Tiling kPairedTiling{{64, 80, 128, 128, 64, 96}, true, {8, 1}, {16, 3}, 2, 1};

// One way of calling the layer.
struct CallShape {
  Direction direction;
  Work work;
  Tiling tiling;
};

std::vector<CallShape> call_shapes() {
  std::vector<CallShape> calls;
  for (const Tiling& tiling : {kReferenceTiling, kPairedTiling}) {
    calls.push_back({Direction::kForward, kForwardWork, tiling});
    for (int bits = 0; bits < 8; ++bits) {
      calls.push_back({Direction::kBackward, {true, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0}, tiling});
    }
    calls.push_back({Direction::kBackward, {false, false, true, true}, tiling});
    for (const Recompute recompute : {Recompute::kInSeveralPasses, Recompute::kAlways}) {
      calls.push_back({Direction::kBackward, {true, true, true, true, recompute}, tiling});
      calls.push_back({Direction::kBackward, {false, false, false, true, recompute}, tiling});
    }
  }
  return calls;
}

// check(order of one pass) for every pass of every rank, routing and call; `each_plan` first sees the plan and call.
template <class EachPlan, class EachPass>
void for_each_order(EachPlan each_plan, EachPass each_pass) {
  std::vector<cases::NamedRouting> routings = cases::adversarial_routings();
  for (cases::NamedRouting& routing : cases::random_routings(10)) routings.push_back(std::move(routing));
  for (const cases::NamedRouting& named : routings) {
    SCOPED_TRACE(named.name);
    const Routing routing = named.make();
    // Ranks differ in nothing but their routes: the ends of a large group stand for all.
    for (const int32_t rank : std::set<int32_t>{0, routing.ep_size() / 2, routing.ep_size() - 1}) {
      const RankPlan plan(routing, rank, kHidden, kIntermediate);
      for (const CallShape& call : call_shapes()) {
        SCOPED_TRACE(testing::Message() << "rank " << rank << ", direction " << static_cast<int>(call.direction)
                                        << ", work " << call.work.combine << call.work.dgrad << call.work.down_wgrad
                                        << call.work.gate_up_wgrad << ", recompute "
                                        << static_cast<int>(call.work.recompute) << ", down tile "
                                        << call.tiling.cols[1]);
        each_plan(*plan, call);
        const int64_t own_tokens = routing.num_tokens[static_cast<size_t>(rank)];
        for (int32_t pass = 0; pass < *plan->num_passes; ++pass) {
          each_pass(TaskOrder(*plan, call.direction, pass, own_tokens, call.work, call.tiling), call);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}
template <class EachPass>
void for_each_order(EachPass each_pass) {
  for_each_order([](const Plan&, const CallShape&) {}, each_pass);
}

int32_t tiles(int64_t size, int32_t tile) { return static_cast<int32_t>((size + tile - 1) / tile); }

// Columns of the outputs of a stage, from the products of src/schedule/task_order.hpp.
int64_t output_cols(TaskKind kind) {
  switch (kind) {
    case TaskKind::kGateUp:
    case TaskKind::kDownDgrad:
    case TaskKind::kDownWgrad:
    case TaskKind::kGateUpWgrad:
      return kIntermediate;
    default:
      return kHidden;
  }
}
// Of a weight gradient, tiles of H times tiles of I: those of gate and up apart.
constexpr int32_t kWgradTilesOfH = (kHidden + kBlockRows - 1) / kBlockRows;
int32_t num_weights(TaskKind kind) { return kind == TaskKind::kGateUpWgrad ? 2 : 1; }

bool makes_z_again(const CallShape& call, int32_t num_passes) {
  return call.work.recompute == Recompute::kAlways ||
         (call.work.recompute == Recompute::kInSeveralPasses && num_passes > 1);
}

std::vector<TaskKind> kinds_of(const CallShape& call, int32_t num_passes) {
  if (call.direction == Direction::kForward) return {TaskKind::kGateUp, TaskKind::kDown};
  std::vector<TaskKind> kinds{TaskKind::kDownDgrad};
  if (makes_z_again(call, num_passes)) kinds.push_back(TaskKind::kGateUp);
  if (call.work.dgrad) kinds.push_back(TaskKind::kGateUpDgrad);
  if (call.work.down_wgrad) kinds.push_back(TaskKind::kDownWgrad);
  if (call.work.gate_up_wgrad) kinds.push_back(TaskKind::kGateUpWgrad);
  return kinds;
}

// each(task with the m_tile and n_tile of one of its tiles)
template <class Each>
void for_each_tile(MatrixTask task, Each each) {
  each(task);
  if (task.pair == TilePair::kRows) ++task.m_tile;
  if (task.pair == TilePair::kCols) ++task.n_tile;
  if (task.pair != TilePair::kNone) each(task);
}

using TileKey = std::tuple<TaskKind, int32_t, int32_t, int32_t>;  // kind, local expert, m, n

TEST(TaskOrder, EachTileOfThePassOnce) {
  std::set<std::pair<TaskKind, int32_t>> made_empty;  // weight gradients of experts without rows, over the passes
  for_each_order(
      [&](const Plan&, const CallShape&) { made_empty.clear(); },
      [&](const TaskOrder& order, const CallShape& call) {
        std::set<TileKey> seen;
        for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
          for_each_tile(order.matrix_task(ticket), [&](const MatrixTask& task) {
            ASSERT_TRUE(seen.emplace(task.kind, task.local_expert, task.m_tile, task.n_tile).second)
                << "task " << ticket;
          });
        }
        const Plan& plan = order.plan();
        size_t num_expected = 0;
        for (int32_t expert = 0; expert < plan.shape.num_local_experts(); ++expert) {
          std::vector<int32_t> blocks;  // of the expert, in the window of this pass
          for (int32_t b = plan.expert_block_begin[expert]; b < plan.expert_block_begin[expert + 1]; ++b) {
            if (b / plan.shape.capacity_blocks == order.pass()) blocks.push_back(b);
          }
          for (const TaskKind kind : kinds_of(call, *plan.num_passes)) {
            std::vector<int32_t> m_tiles = blocks;
            if (is_wgrad(kind)) {
              const bool empty_expert_here = plan.expert_rows[expert] == 0 && seen.contains({kind, expert, 0, 0});
              ASSERT_TRUE(!empty_expert_here || made_empty.emplace(kind, expert).second) << "expert " << expert;
              m_tiles.clear();
              const bool made = !blocks.empty() || empty_expert_here;
              for (int32_t m = 0; made && m < kWgradTilesOfH; ++m) m_tiles.push_back(m);
            }
            for (const int32_t m : m_tiles) {
              const int32_t n_tiles = num_weights(kind) * tiles(output_cols(kind), order.tile_cols(kind));
              for (int32_t n = 0; n < n_tiles; ++n, ++num_expected) {
                ASSERT_TRUE(seen.contains({kind, expert, m, n})) << "expert " << expert << ", m " << m << ", n " << n;
              }
            }
          }
          const bool is_last = order.last_pass() && plan.expert_rows[expert] == 0;
          ASSERT_TRUE(!is_last || !call.work.down_wgrad || made_empty.contains({TaskKind::kDownWgrad, expert}));
          ASSERT_TRUE(!is_last || !call.work.gate_up_wgrad || made_empty.contains({TaskKind::kGateUpWgrad, expert}));
        }
        ASSERT_EQ(seen.size(), num_expected);
      });
}

// Runs the tickets one by one with all rows pulled, as the slowest machine would: nothing may have to wait.
TEST(TaskOrder, NoTaskWaitsForALaterTicket) {
  for_each_order([](const TaskOrder& order, const CallShape& call) {
    const bool forward = call.direction == Direction::kForward;
    const int32_t mid_tiles = tiles(kIntermediate, order.tile_cols(forward ? TaskKind::kGateUp : TaskKind::kDownDgrad));
    const int32_t out_tiles = tiles(kHidden, order.tile_cols(forward ? TaskKind::kDown : TaskKind::kGateUpDgrad));
    const bool recomputes = !forward && makes_z_again(call, *order.plan().num_passes);
    const int32_t z_tiles = tiles(kIntermediate, order.tile_cols(TaskKind::kGateUp));
    std::map<int32_t, int32_t> z_ready;
    std::map<int32_t, int32_t> mid_ready;
    std::map<int32_t, int32_t> out_ready;
    for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
      for_each_tile(order.matrix_task(ticket), [&](const MatrixTask& task) {
        switch (task.kind) {
          case TaskKind::kGateUp:
            ++(forward ? mid_ready : z_ready)[order.physical_block(task.m_tile)];
            break;
          case TaskKind::kDownDgrad:
            ASSERT_EQ(z_ready[order.physical_block(task.m_tile)], recomputes ? z_tiles : 0) << "task " << ticket;
            ++mid_ready[order.physical_block(task.m_tile)];
            break;
          case TaskKind::kDown:
          case TaskKind::kGateUpDgrad:
            ASSERT_EQ(mid_ready[order.physical_block(task.m_tile)], mid_tiles) << "task " << ticket;
            ++out_ready[order.physical_block(task.m_tile)];
            break;
          case TaskKind::kDownWgrad:
          case TaskKind::kGateUpWgrad: {
            const BlockRange blocks = order.blocks(task.local_expert);
            for (int32_t block = blocks.begin; block < blocks.end; ++block) {
              ASSERT_EQ(mid_ready[order.physical_block(block)], mid_tiles) << "task " << ticket;
            }
            break;
          }
        }
      });
    }
    // The targets of the waiters: every block of the pass, and no counter beyond its tiles.
    const Plan& plan = order.plan();
    const int32_t window = order.pass() * plan.shape.capacity_blocks;
    for (int32_t block = window; block < std::min(plan.num_blocks(), window + plan.shape.capacity_blocks); ++block) {
      ASSERT_EQ(z_ready[order.physical_block(block)], recomputes ? z_tiles : 0);
      ASSERT_EQ(mid_ready[order.physical_block(block)], mid_tiles);
      ASSERT_EQ(out_ready[order.physical_block(block)], forward || call.work.dgrad ? out_tiles : 0);
    }
  });
}

// Whose weight tiles it takes.
TEST(TaskOrder, AnOddLastRowOfTilesFollowsEveryTwoColumnsOfTheOthers) {
  const Routing routing = cases::routing_of_group_sizes({1, 1, {2 * kBlockRows + 1}}, {2 * kBlockRows + 1});
  const RankPlan plan(routing, 0, kHidden, kIntermediate);
  const auto sequence = [&](int32_t cols) {
    Tiling tiling = kPairedTiling;
    tiling.cols[static_cast<int32_t>(TaskKind::kGateUp)] = cols;
    const TaskOrder order(*plan, Direction::kForward, 0, routing.num_tokens[0], kForwardWork, tiling);
    std::string tasks;
    for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
      const MatrixTask task = order.matrix_task(ticket);
      if (task.kind != TaskKind::kGateUp) continue;
      const char* pair = task.pair == TilePair::kRows ? "rows" : task.pair == TilePair::kCols ? "cols" : "none";
      tasks += words(pair, "(", task.m_tile, ",", task.n_tile, ") ");
    }
    return tasks;
  };
  EXPECT_EQ(sequence(64), "rows(0,0) rows(0,1) cols(2,0) rows(0,2) rows(0,3) cols(2,2) ");
  EXPECT_EQ(sequence(96), "rows(0,0) rows(0,1) cols(2,0) rows(0,2) none(2,2) ");
}

TEST(TaskOrder, PulledRowsReachTheTargetsOfTheirBlocks) {
  for_each_order([](const TaskOrder& order, const CallShape&) {
    const Plan& plan = order.plan();
    std::map<int32_t, int32_t> rows_ready;
    const CommOrder comm = order.comm();
    for (int32_t ticket = 0; ticket < comm.num_pull_tasks(); ++ticket) {
      const CommTask task = comm.task(ticket);
      for (int32_t row = task.begin; row < task.end; ++row) {
        for_each_pulled_row(plan, row, [&](int32_t pulled) { ++rows_ready[pulled / kBlockRows]; });
        // Nothing of a block is left for the pulls of a later one, which matrix tasks would wait for.
        if ((row + 1) % kBlockRows == 0) {
          ASSERT_EQ(rows_ready[row / kBlockRows], kBlockRows) << "row " << row;
        }
      }
    }
    size_t num_blocks = 0;
    for (int32_t expert = 0; expert < plan.shape.num_local_experts(); ++expert) {
      const BlockRange blocks = order.blocks(expert);
      for (int32_t block = blocks.begin; block < blocks.end; ++block, ++num_blocks) {
        ASSERT_GT(order.valid_rows(expert, block), 0);
        ASSERT_EQ(rows_ready[block], kBlockRows) << "block " << block;
      }
    }
    ASSERT_EQ(rows_ready.size(), num_blocks);
  });
}

// The tile walk says where an expert begins and ends; the sums of its weight gradient over the passes rest on it.
TEST(TaskOrder, StraddlingExpertsBeginAndEndOnce) {
  std::map<int32_t, std::vector<std::pair<bool, bool>>> turns;  // by expert: continues from earlier, in a later pass
  for_each_order([&](const Plan&, const CallShape&) { turns.clear(); },
                 [&](const TaskOrder& order, const CallShape&) {
                   for (int32_t expert = 0; expert < order.shape().num_local_experts(); ++expert) {
                     if (!order.makes_wgrad(expert)) continue;
                     turns[expert].emplace_back(order.continues_from_earlier_pass(expert),
                                                order.continues_in_later_pass(expert));
                     const ExpertRows rows = expert_rows_in_pass(order.plan(), expert, order.pass());
                     ASSERT_EQ(std::pair(rows.resumes, rows.continues), turns[expert].back()) << "expert " << expert;
                     const BlockRange blocks = order.blocks(expert);
                     int32_t num_rows = 0;
                     for (int32_t b = blocks.begin; b < blocks.end; ++b) num_rows += order.valid_rows(expert, b);
                     ASSERT_EQ(rows.count, num_rows) << "expert " << expert;
                     ASSERT_TRUE(num_rows == 0 || rows.begin == blocks.begin * kBlockRows) << "expert " << expert;
                   }
                   if (!order.last_pass()) return;
                   for (int32_t expert = 0; expert < order.shape().num_local_experts(); ++expert) {
                     ASSERT_FALSE(turns[expert].empty()) << "expert " << expert;
                     for (size_t n = 0; n < turns[expert].size(); ++n) {
                       const std::pair expected{n > 0, n + 1 < turns[expert].size()};
                       ASSERT_EQ(turns[expert][n], expected) << "expert " << expert << ", turn " << n;
                     }
                   }
                 });
}

TEST(TaskOrder, CommunicationCoversEntriesAndTokensOnceAndInOrder) {
  for_each_order([](const TaskOrder& order, const CallShape& call) {
    using Turn = std::pair<int32_t, CommTaskKind>;  // part, kind
    const Plan& plan = order.plan();
    const CommOrder comm = order.comm();
    const int32_t first_entry = plan.pass_entry_begin[order.pass()];
    const int32_t end_entry = plan.pass_entry_begin[order.pass() + 1];
    std::map<Turn, int32_t> next;
    next[{0, CommTaskKind::kPull}] = comm.first_row;
    for (int32_t part = 0; part < comm.num_parts; ++part) next[{part, CommTaskKind::kCombine}] = first_entry;
    Turn previous{0, CommTaskKind::kPull};
    for (int32_t ticket = 0; ticket < comm.num_tasks(); ++ticket) {
      const CommTask task = comm.task(ticket);
      const Turn turn{task.kind == CommTaskKind::kDrain ? comm.num_parts - 1 : task.part, task.kind};
      ASSERT_GE(turn, previous) << "task " << ticket;
      previous = turn;
      if (task.kind == CommTaskKind::kPullsDone || task.kind == CommTaskKind::kDrain) {
        ASSERT_EQ(next[turn]++, 0);
        continue;
      }
      ASSERT_EQ(task.begin, next[turn]) << "task " << ticket;
      ASSERT_GT(task.end, task.begin);
      ASSERT_LE(task.end - task.begin, task.kind == CommTaskKind::kPull      ? comm.pull_rows
                                       : task.kind == CommTaskKind::kCombine ? comm.combine_entries
                                                                             : comm.sum_batch);
      next[turn] = task.end;
    }
    ASSERT_EQ((next[{0, CommTaskKind::kPull}]), comm.first_row + comm.num_rows);
    ASSERT_EQ((next[{0, CommTaskKind::kPullsDone}]), 1);
    ASSERT_EQ((next[{comm.num_parts - 1, CommTaskKind::kDrain}]), 1);
    for (int32_t part = 0; part < comm.num_parts; ++part) {
      ASSERT_EQ((next[{part, CommTaskKind::kCombine}]), call.work.combine ? end_entry : first_entry);
      ASSERT_EQ((next[{part, CommTaskKind::kSumTokens}]), call.work.combine ? comm.num_own_tokens : 0);
    }
  });
}

TEST(TaskOrder, TasksOfAllPassesStayUnderTheBoundOfTheShape) {
  int64_t tasks = 0;
  for_each_order([&](const Plan&, const CallShape&) { tasks = 0; },
                 [&](const TaskOrder& order, const CallShape&) {
                   tasks += order.num_matrix_tasks();
                   ASSERT_LE(tasks, order.max_matrix_tasks());
                 });
}

// The order as the head of task_order.hpp draws it, for three groups of experts.
TEST(TaskOrder, StagesFollowTheirProducersOneGroupBehind) {
  using Turn = std::pair<TaskKind, int32_t>;  // kind, group of experts
  constexpr int32_t kGroups = 3;
  constexpr int32_t kExpertsPerGroup = 4;
  const Routing routing = cases::uniform_routing({kGroups * kExpertsPerGroup, 4, {300}}, 1);
  const RankPlan plan(routing, 0, kHidden, kIntermediate);
  const auto turns_of = [&](Direction direction, const Work& work) {
    Tiling tiling = kReferenceTiling;
    tiling.group_blocks = plan->num_blocks() / kGroups;
    const TaskOrder order(*plan, direction, 0, 300, work, tiling);
    EXPECT_EQ(order.experts_per_group(), kExpertsPerGroup);
    std::vector<Turn> turns;
    for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
      const MatrixTask task = order.matrix_task(ticket);
      const Turn turn(task.kind, task.local_expert / kExpertsPerGroup);
      if (turns.empty() || turns.back() != turn) turns.push_back(turn);
    }
    return turns;
  };
  using K = TaskKind;
  const std::vector<Turn> forward = {{K::kGateUp, 0}, {K::kGateUp, 1}, {K::kDown, 0},
                                     {K::kGateUp, 2}, {K::kDown, 1},   {K::kDown, 2}};
  EXPECT_EQ(turns_of(Direction::kForward, kForwardWork), forward);
  const std::vector<Turn> backward = {{K::kDownDgrad, 0},   {K::kDownDgrad, 1},   {K::kDownWgrad, 0},
                                      {K::kDownDgrad, 2},   {K::kDownWgrad, 1},   {K::kGateUpDgrad, 0},
                                      {K::kGateUpWgrad, 0}, {K::kDownWgrad, 2},   {K::kGateUpDgrad, 1},
                                      {K::kGateUpWgrad, 1}, {K::kGateUpDgrad, 2}, {K::kGateUpWgrad, 2}};
  EXPECT_EQ(turns_of(Direction::kBackward, {true, true, true, true}), backward);
  // One pass, in which what was saved is there.
  EXPECT_EQ(turns_of(Direction::kBackward, {true, true, true, true, Recompute::kInSeveralPasses}), backward);
  const std::vector<Turn> recomputing = {
      {K::kGateUp, 0},    {K::kGateUp, 1},      {K::kDownDgrad, 0},   {K::kGateUp, 2},      {K::kDownDgrad, 1},
      {K::kDownWgrad, 0}, {K::kDownDgrad, 2},   {K::kDownWgrad, 1},   {K::kGateUpDgrad, 0}, {K::kGateUpWgrad, 0},
      {K::kDownWgrad, 2}, {K::kGateUpDgrad, 1}, {K::kGateUpWgrad, 1}, {K::kGateUpDgrad, 2}, {K::kGateUpWgrad, 2}};
  EXPECT_EQ(turns_of(Direction::kBackward, {true, true, true, true, Recompute::kAlways}), recomputing);
}

// One rank alone has a token for each lane of a warp; several share out the end of a call.
TEST(TaskOrder, SumsOfOneRankFillAWarpAndThoseOfSeveralAreSmall) {
  for (const int32_t num_ranks : {1, 2, 4}) {
    const std::vector<int64_t> num_tokens(static_cast<size_t>(num_ranks), 70);
    const RankPlan plan(cases::uniform_routing({8, 2, num_tokens}, 1), 0, kHidden, kIntermediate);
    const TaskOrder order(*plan, Direction::kForward, 0, 70, kForwardWork);
    EXPECT_EQ(order.comm().num_sum_tasks, num_ranks == 1 ? 3 : 35) << num_ranks << " ranks";
  }
}

// Where tasks take own tokens from where they lie, a rank alone has nothing to pull.
TEST(TaskOrder, OneRankPullsNothingIfItsTasksGather) {
  Tiling tiling = kReferenceTiling;
  tiling.forward.pulls_alone = false;
  for (const int32_t num_ranks : {1, 2}) {
    const std::vector<int64_t> num_tokens(static_cast<size_t>(num_ranks), 70);
    const RankPlan plan(cases::uniform_routing({8, 2, num_tokens}, 1), 0, kHidden, kIntermediate);
    const TaskOrder order(*plan, Direction::kForward, 0, 70, kForwardWork, tiling);
    EXPECT_EQ(order.comm().num_pull_tasks(), num_ranks == 1 ? 0 : plan->num_blocks()) << num_ranks << " ranks";
  }
}

// A rank's own tokens are summed in every pass, whether or not it holds rows.
TEST(TaskOrder, OwnTokensAreSummedInEveryPass) {
  const Routing routing = cases::skewed_routing({6, 1, {0, 40, 700}, 2}, 0, 1);
  for (int32_t rank = 0; rank < 3; ++rank) {
    const RankPlan plan(routing, rank, kHidden, kIntermediate);
    ASSERT_EQ(*plan->num_passes, 3);
    for (int32_t pass = 0; pass < 3; ++pass) {
      const TaskOrder order(*plan, Direction::kForward, pass, routing.num_tokens[static_cast<size_t>(rank)],
                            kForwardWork);
      std::vector<int32_t> sums(static_cast<size_t>(routing.num_tokens[static_cast<size_t>(rank)]), 0);
      for (int32_t ticket = 0; ticket < order.comm().num_tasks(); ++ticket) {
        const CommTask task = order.comm().task(ticket);
        if (task.kind != CommTaskKind::kSumTokens) continue;
        for (int32_t token = task.begin; token < task.end; ++token) ++sums[static_cast<size_t>(token)];
      }
      for (const int32_t times : sums) ASSERT_EQ(times, 1);
    }
  }
}

}  // namespace
}  // namespace weft
