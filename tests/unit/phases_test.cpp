// Phases over every routing, direction and tiling: together they run each task of a call once, and each comes behind
// the phases whose flags its tasks wait for.
#include "schedule/phases.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cases/planned.hpp"

namespace weft {
namespace {

using cases::RankPlan;
using cases::Routing;

constexpr Tiling kPairedTiling{{64, 80, 128, 128, 64, 96}, true, {8, 1}, {16, 3}, 2, 1};
constexpr Work kWholeBackward{true, true, true, true, Recompute::kAlways};

std::vector<PhaseMask> phases_in_order(Direction direction) {
  std::vector<PhaseMask> phases;
  for (const PhaseMask phase : phases_of(direction)) {
    if (phase != 0) phases.push_back(phase);
  }
  return phases;
}

// check(order of one pass, direction)
template <class Check>
void for_each_order(Check check) {
  for (const cases::NamedRouting& named : cases::adversarial_routings()) {
    SCOPED_TRACE(named.name);
    const Routing routing = named.make();
    const RankPlan plan(routing, routing.ep_size() - 1, 384, 256);
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Work work = direction == Direction::kForward ? kForwardWork : kWholeBackward;
      for (const Tiling& tiling : {kReferenceTiling, kPairedTiling}) {
        for (int32_t pass = 0; pass < *plan->num_passes; ++pass) {
          check(TaskOrder(*plan, direction, pass, routing.num_tokens.back(), work, tiling), direction);
        }
      }
    }
  }
}

TEST(Phases, EachMatrixTaskIsOfOnePhaseOfItsDirection) {
  for_each_order([](const TaskOrder& order, Direction direction) {
    const std::vector<PhaseMask> phases = phases_in_order(direction);
    for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
      const PhaseMask own = matrix_phase(order.matrix_task(ticket).kind);
      ASSERT_EQ(std::count_if(phases.begin(), phases.end(), [&](PhaseMask phase) { return (phase & own) != 0; }), 1);
    }
  });
}

TEST(Phases, EachCommunicationTicketIsOfOnePhase) {
  for_each_order([](const TaskOrder& order, Direction direction) {
    const CommOrder comm = order.comm();
    int32_t next = 0;
    for (const PhaseMask phase : phases_in_order(direction)) {
      const TicketRange tickets = comm_tickets(comm, phase);
      if (tickets.begin == tickets.end) continue;
      ASSERT_EQ(tickets.begin, next);
      for (next = tickets.begin; next < tickets.end; ++next) {
        const CommTaskKind kind = comm.task(next).kind;
        const bool pulls = kind == CommTaskKind::kPull || kind == CommTaskKind::kPullsDone;
        ASSERT_EQ(phase, pulls ? kPullPhase : kCombinePhase);
      }
    }
    ASSERT_EQ(next, comm.num_tasks());
  });
}

TEST(Phases, AllOfThemTogetherAreTheOverlappedCall) {
  for_each_order([](const TaskOrder& order, Direction direction) {
    const CommOrder comm = order.comm();
    for (const PhaseMask all : {kAllPhases, all_phases_of(direction)}) {
      ASSERT_EQ(comm_tickets(comm, all).begin, 0);
      ASSERT_EQ(comm_tickets(comm, all).end, comm.num_tasks());
    }
    const TicketRange none = comm_tickets(comm, 0);
    ASSERT_EQ(none.begin, none.end);
  });
}

// What the launches of a call run, as (pass, ticket) in order.
struct Tickets {
  std::vector<std::pair<int32_t, int32_t>> matrix;
  std::vector<std::pair<int32_t, int32_t>> comm;
};
Tickets run_call(const Plan& plan, Direction direction, const Work& work, int64_t own_tokens, bool one_by_one) {
  Tickets run;
  const auto max_passes = static_cast<int32_t>(plan.shape.max_passes());
  for_each_launch(direction, one_by_one, 0, max_passes, [&](const LaunchRange& launch) {
    for (int32_t pass = launch.first_pass; pass < std::min(launch.end_pass, *plan.num_passes); ++pass) {
      const TaskOrder order(plan, direction, pass, own_tokens, work, kPairedTiling);
      for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
        const bool runs = (matrix_phase(order.matrix_task(ticket).kind) & launch.phases) != 0;
        if (runs) run.matrix.emplace_back(pass, ticket);
      }
      const TicketRange tickets = comm_tickets(order.comm(), launch.phases);
      for (int32_t ticket = tickets.begin; ticket < tickets.end; ++ticket) run.comm.emplace_back(pass, ticket);
    }
  });
  return run;
}

TEST(Phases, LaunchesOneByOneRunTheTicketsOfTheOneLaunch) {
  for (const cases::NamedRouting& named : cases::adversarial_routings()) {
    SCOPED_TRACE(named.name);
    const Routing routing = named.make();
    const RankPlan plan(routing, 0, 384, 256);
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Work work = direction == Direction::kForward ? kForwardWork : kWholeBackward;
      const int64_t own_tokens = routing.num_tokens.front();
      const Tickets whole = run_call(*plan, direction, work, own_tokens, false);
      Tickets parts = run_call(*plan, direction, work, own_tokens, true);
      ASSERT_EQ(parts.comm, whole.comm);
      std::sort(parts.matrix.begin(), parts.matrix.end());  // kind by kind
      ASSERT_EQ(parts.matrix, whole.matrix);
    }
  }
}

TEST(Phases, ALaunchLeavesOutWhatIsSkipped) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const bool one_by_one : {false, true}) {
      for (PhaseMask skipped = 0; skipped <= kAllPhases; ++skipped) {
        PhaseMask run = 0;
        for_each_launch(direction, one_by_one, skipped, 1, [&](const LaunchRange& launch) { run |= launch.phases; });
        ASSERT_EQ(run & skipped, 0U);
        ASSERT_EQ(run & all_phases_of(direction), all_phases_of(direction) & ~skipped);
      }
    }
  }
}

// The phases that raise what a phase's tasks wait for (src/schedule/task_order.hpp).
std::vector<PhaseMask> awaited(PhaseMask phase, Direction direction) {
  const bool forward = direction == Direction::kForward;
  const PhaseMask mid = matrix_phase(forward ? TaskKind::kGateUp : TaskKind::kDownDgrad);
  const PhaseMask out = matrix_phase(forward ? TaskKind::kDown : TaskKind::kGateUpDgrad);
  if (phase == kPullPhase) return {};
  if (phase == matrix_phase(TaskKind::kGateUp)) return {kPullPhase};
  if (phase == mid) return {kPullPhase, matrix_phase(TaskKind::kGateUp)};  // where z is made again
  return phase == kCombinePhase ? std::vector<PhaseMask>{mid, out} : std::vector<PhaseMask>{mid};
}

TEST(Phases, EachComesBehindThoseItWaitsFor) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    PhaseMask before = 0;
    for (const PhaseMask phase : phases_in_order(direction)) {
      for (const PhaseMask needed : awaited(phase, direction)) EXPECT_EQ(before & needed, needed) << phase;
      EXPECT_EQ(before & phase, 0U) << phase << " comes twice";
      before |= phase;
    }
  }
}

}  // namespace
}  // namespace weft
