// The explorer itself, on the classic small programs: it must find what is wrong in each, and nothing in its right
// twin.
#include "protocol/machine.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "protocol/explorer.hpp"

namespace weft::explore {
namespace {

using Program = std::function<void(Machine&, int32_t w)>;
constexpr Scope kSystem = Scope::kSystem;
constexpr Scope kRank = Scope::kRank;

// Two flags, three cells (the last two private buffers of the first worker), one worker a program, each its own rank.
struct System {
  uint32_t flag = 0;
  uint32_t other_flag = 0;
  Explorer explorer;
  Machine::Cell data = 0;
  Machine::Cell staging = 1;
  std::vector<Program> programs;

  explicit System(std::vector<Program> workers) : programs(std::move(workers)) {
    Machine& machine = explorer.machine();
    machine.add_flag(&flag, "flag", 0, FlagKind::kArrived);
    machine.add_flag(&other_flag, "other flag", 0, FlagKind::kArrived);
    machine.add_cells("data", 3);
    for (size_t w = 0; w < programs.size(); ++w) machine.add_worker(static_cast<int32_t>(w), "worker");
  }
  Outcome explore(const Limits& limits = {}) {
    return explorer.explore(
        limits, [] {}, [this](int32_t w) { programs[static_cast<size_t>(w)](explorer.machine(), w); },
        [] { return std::string(); });
  }
};

// The two words polled last are those that a pause watches.
void wait_for(Machine& machine, int32_t w, const uint32_t* flag, uint64_t value, const uint32_t* other) {
  for (;;) {
    if (machine.poll(w, flag) == value) return;
    machine.poll(w, other);
    machine.pause(w);
  }
}

struct Passing {  // how a datum goes from one worker to another
  Scope release_scope = kSystem;
  Scope acquire_scope = kSystem;
  bool relaxed_release = false;
  bool relaxed_acquire = false;
};

Verdict pass_a_message(const Passing& how) {
  System* self = nullptr;
  System system({[&](Machine& m, int32_t w) {
                   m.write(w, self->data, 7);
                   m.release(w, &self->flag, 1, how.release_scope, how.relaxed_release);
                 },
                 [&](Machine& m, int32_t w) {
                   wait_for(m, w, &self->flag, 1, &self->other_flag);
                   m.acquire(w, &self->flag, how.acquire_scope, how.relaxed_acquire);
                   if (m.read(w, self->data) != 7) m.fail(Verdict::kWrongValue, "stale");
                 }});
  self = &system;
  return system.explore().verdict;
}

TEST(Machine, MessagePassing) {
  EXPECT_EQ(pass_a_message({}), Verdict::kPass);
  EXPECT_EQ(pass_a_message({kSystem, kSystem, true, false}), Verdict::kRace);
  EXPECT_EQ(pass_a_message({kSystem, kSystem, false, true}), Verdict::kRace);
  EXPECT_EQ(pass_a_message({kRank, kSystem, false, false}), Verdict::kRace);
  EXPECT_EQ(pass_a_message({kSystem, kRank, false, false}), Verdict::kRace);
}

// Two writers count a flag up; the reader waits for both. Additions continue each other's releases, a store does not.
TEST(Machine, AdditionsContinueWhatWasReleasedAndStoresDoNot) {
  for (const bool store : {false, true}) {
    System* self = nullptr;
    const auto writer = [&](Machine::Cell cell) {
      return [&self, cell](Machine& m, int32_t w) {
        m.write(w, cell, 1);
        m.release_add(w, &self->flag, 1, kSystem);
      };
    };
    System system({writer(0), writer(1),
                   [&](Machine& m, int32_t w) {
                     wait_for(m, w, &self->flag, 2, &self->other_flag);
                     if (store)
                       m.release(w, &self->flag, 3, kSystem);
                     else
                       m.release_add(w, &self->flag, 1, kSystem);
                   },
                   [&](Machine& m, int32_t w) {
                     wait_for(m, w, &self->flag, 3, &self->other_flag);
                     m.acquire(w, &self->flag, kSystem);
                     m.read(w, 0);
                     m.read(w, 1);
                   }});
    self = &system;
    EXPECT_EQ(system.explore().verdict, store ? Verdict::kRace : Verdict::kPass);
  }
}

TEST(Machine, ClaimsGiveEachTicketOnceAndSplitOnesDoNot) {
  for (const bool split : {false, true}) {
    System* self = nullptr;
    const Program claim = [&](Machine& m, int32_t w) {
      uint64_t ticket = 0;
      if (split) {
        ticket = m.poll(w, &self->flag);
        m.release(w, &self->flag, ticket + 1, kSystem);
      } else {
        ticket = m.claim(w, &self->flag);
      }
      m.write(w, static_cast<Machine::Cell>(ticket), 1);
    };
    System system({claim, claim, claim});
    self = &system;
    EXPECT_EQ(system.explore().verdict, split ? Verdict::kRace : Verdict::kPass);
  }
}

enum class CopyWait { kNone, kRead, kLanded };

Verdict copy_and_announce(CopyWait wait, bool finds_races, Grain grain) {
  System* self = nullptr;
  System system({[&](Machine& m, int32_t w) {
                   m.write(w, self->staging, 5);
                   m.copy_async(w, self->data, self->staging, true);
                   if (wait != CopyWait::kNone) m.wait_copies(w, wait == CopyWait::kRead);
                   m.release(w, &self->flag, 1, kSystem);
                 },
                 [&](Machine& m, int32_t w) {
                   wait_for(m, w, &self->flag, 1, &self->other_flag);
                   m.acquire(w, &self->flag, kSystem);
                   if (m.read(w, self->data) != 5) m.fail(Verdict::kWrongValue, "the copy has not landed");
                 }});
  self = &system;
  system.explorer.machine().finds_races = finds_races;
  system.explorer.machine().grain = grain;
  return system.explore().verdict;
}

TEST(Machine, CopiesLandWhenWaitedForAndNotBefore) {
  EXPECT_EQ(copy_and_announce(CopyWait::kLanded, true, Grain::kCopies), Verdict::kPass);
  for (const CopyWait wait : {CopyWait::kNone, CopyWait::kRead}) {
    EXPECT_NE(copy_and_announce(wait, true, Grain::kSynchronisation), Verdict::kPass);
    EXPECT_EQ(copy_and_announce(wait, false, Grain::kSynchronisation), Verdict::kWrongValue);
    EXPECT_EQ(copy_and_announce(wait, false, Grain::kCopies), Verdict::kWrongValue);
  }
}

TEST(Machine, StagingBufferMayBeWrittenAgainOnceItHasBeenRead) {
  for (const bool waits : {true, false}) {
    System* self = nullptr;
    System system({[&](Machine& m, int32_t w) {
      for (uint64_t value : {1U, 2U}) {
        if (waits) m.wait_copies(w, true);
        m.write(w, self->staging, value);
        m.copy_async(w, value == 1 ? self->data : 2, self->staging, true);
      }
      m.wait_copies(w, false);
      if (m.read(w, self->data) != 1) m.fail(Verdict::kWrongValue, "overwritten before it was read");
    }});
    self = &system;
    system.explorer.machine().grain = Grain::kCopies;
    EXPECT_EQ(system.explore().verdict == Verdict::kPass, waits);
  }
}

TEST(Machine, AsynchronousLoadsNeedTheProxyFence) {
  for (const bool fences : {true, false}) {
    System* self = nullptr;
    System system({[&](Machine& m, int32_t w) {
                     m.write(w, self->data, 7);
                     m.release(w, &self->flag, 1, kSystem);
                   },
                   [&](Machine& m, int32_t w) {
                     wait_for(m, w, &self->flag, 1, &self->other_flag);
                     m.acquire(w, &self->flag, kSystem);
                     if (fences) m.fence_async_proxy(w);
                     m.load_async(w, self->data);
                   }});
    self = &system;
    EXPECT_EQ(system.explore().verdict, fences ? Verdict::kPass : Verdict::kRace);
  }
}

TEST(Machine, ClearingRacesWithAccesses) {
  System* self = nullptr;
  System system({[&](Machine& m, int32_t w) { m.clear(w, &self->flag); },
                 [&](Machine& m, int32_t w) { m.release_add(w, &self->flag, 1, kSystem); }});
  self = &system;
  EXPECT_EQ(system.explore().verdict, Verdict::kRace);
}

TEST(Machine, DeadlockNamesWhoWaitsForWhat) {
  System* self = nullptr;
  System system({[&](Machine& m, int32_t w) {
                   wait_for(m, w, &self->flag, 1, &self->other_flag);
                   m.release(w, &self->other_flag, 1, kSystem);
                 },
                 [&](Machine& m, int32_t w) {
                   wait_for(m, w, &self->other_flag, 1, &self->flag);
                   m.release(w, &self->flag, 1, kSystem);
                 }});
  self = &system;
  const Outcome outcome = system.explore();
  EXPECT_EQ(outcome.verdict, Verdict::kDeadlock);
  EXPECT_NE(outcome.words.find("rank 0 worker waits for flag of rank 0, which is 0"), std::string::npos);
  EXPECT_NE(outcome.words.find("rank 1 worker waits for other flag of rank 0, which is 0"), std::string::npos);
}

TEST(Machine, LivelockEnds) {
  System* self = nullptr;
  System system({[&](Machine& m, int32_t w) {
    while (m.poll(w, &self->flag) == 0) continue;
  }});
  self = &system;
  EXPECT_EQ(system.explore().verdict, Verdict::kLivelock);
}

// The fault needs one preemption: between the first worker's two steps.
TEST(Machine, BoundOnPreemptionsCountsSwitchesAwayFromWhoCanGoOn) {
  System* self = nullptr;
  System system({[&](Machine& m, int32_t w) {
                   m.release(w, &self->flag, 1, kSystem);
                   m.release(w, &self->flag, 0, kSystem);
                 },
                 [&](Machine& m, int32_t w) {
                   m.poll(w, &self->other_flag);
                   if (m.poll(w, &self->flag) == 1) m.fail(Verdict::kWrongValue, "seen between");
                 }});
  self = &system;
  Limits limits;
  limits.max_preemptions = 0;
  EXPECT_EQ(system.explore(limits).verdict, Verdict::kPass);
  limits.max_preemptions = 1;
  EXPECT_EQ(system.explore(limits).verdict, Verdict::kWrongValue);
  limits.max_preemptions = -1;
  EXPECT_EQ(system.explore(limits).verdict, Verdict::kWrongValue);
}

// Two workers of three steps each on flags of their own: all orders lead to the same states, (3 + 1)^2 at most.
TEST(Machine, StatesSeenBeforeAreNotSearchedAgain) {
  System* self = nullptr;
  const auto count = [&](uint32_t System::*flag) {
    return [&self, flag](Machine& m, int32_t w) {
      for (int n = 0; n < 3; ++n) m.release_add(w, &(self->*flag), 1, kSystem);
    };
  };
  System system({count(&System::flag), count(&System::other_flag)});
  self = &system;
  const Outcome outcome = system.explore();
  EXPECT_EQ(outcome.verdict, Verdict::kPass);
  EXPECT_LE(outcome.num_states, 16);
}

TEST(Machine, DeadlinesPassOnlyWhenNothingElseCanHappen) {
  System* self = nullptr;
  bool passed = false;
  System system({[&](Machine& m, int32_t w) {
                   m.poll(w, &self->flag);
                   m.poll(w, &self->other_flag);
                   if (!m.pause(w)) m.fail(Verdict::kWrongValue, "the other worker could still go on");
                   m.poll(w, &self->flag);
                   m.poll(w, &self->other_flag);
                   passed = !m.pause(w);
                 },
                 [&](Machine& m, int32_t w) { m.release(w, &self->flag, 1, kSystem); }});
  self = &system;
  Limits limits;
  limits.deadlines = true;
  limits.max_preemptions = 0;  // the first worker waits first
  EXPECT_EQ(system.explore(limits).verdict, Verdict::kPass);
  EXPECT_TRUE(passed);
}

}  // namespace
}  // namespace weft::explore
