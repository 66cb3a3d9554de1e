// Gates, rank barrier and stall reports on host threads, each rank a thread; the thread sanitizer watches the data that
// the flags announce.
#include "protocol/gate.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "protocol/rank_barrier.hpp"
#include "protocol/stall.hpp"

namespace weft {
namespace {

constexpr double kLongDeadline = 60;  // never passes in a test that is right
constexpr double kShortDeadline = 0.05;

class Ranks {
 public:
  explicit Ranks(int32_t num_ranks) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      blocks_.push_back(std::make_unique<ControlBlock>());
      controls_[rank] = blocks_.back().get();
    }
  }
  ControlBlock* const* controls() const { return controls_; }
  int32_t size() const { return static_cast<int32_t>(blocks_.size()); }

  // Runs body(rank) on a thread a rank.
  template <class Body>
  void run(Body body) {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<std::unique_ptr<ControlBlock>> blocks_;
  ControlBlock* controls_[kMaxRanks] = {};
};

constexpr WaitSite kSite{WaitTask::kGateUp, 12, FlagKind::kRowsReady, 3, -1};

TEST(Gate, OrdersTheDataBehindTheFlag) {
  Ranks ranks(1);
  uint32_t flag = 0;
  int64_t data = 0;
  constexpr uint32_t kRounds = 2000;
  uint32_t answered = 0;
  std::thread writer([&] {
    HostMemory memory(kLongDeadline);
    Gate<HostMemory> gate(memory, ranks.controls(), 0, 1);
    for (uint32_t round = 1; round <= kRounds; ++round) {
      data = round;
      memory.release(&flag, round, Scope::kRank);
      ASSERT_TRUE(gate.wait(&answered, round, Scope::kRank, kSite));
    }
  });
  HostMemory memory(kLongDeadline);
  Gate<HostMemory> gate(memory, ranks.controls(), 0, 1);
  for (uint32_t round = 1; round <= kRounds; ++round) {
    ASSERT_TRUE(gate.wait(&flag, round, Scope::kRank, kSite));
    ASSERT_EQ(data, round);
    memory.release(&answered, round, Scope::kRank);
  }
  writer.join();
  EXPECT_FALSE(gate.report().stalled);
}

TEST(Gate, CountersOrderAllThatWereCounted) {
  Ranks ranks(1);
  constexpr int32_t kWriters = 4;
  constexpr uint32_t kTickets = 1000;
  uint32_t ticket = 0;
  uint32_t done = 0;
  std::vector<int32_t> claims(kTickets, 0);
  std::vector<std::thread> writers;
  for (int32_t n = 0; n < kWriters; ++n) {
    writers.emplace_back([&] {
      HostMemory memory(kLongDeadline);
      for (;;) {
        const uint32_t mine = memory.claim(&ticket);
        if (mine >= kTickets) return;
        ++claims[mine];  // plain: a ticket has one owner
        memory.release_add(&done, 1, Scope::kRank);
      }
    });
  }
  HostMemory memory(kLongDeadline);
  Gate<HostMemory> gate(memory, ranks.controls(), 0, 1);
  ASSERT_TRUE(gate.wait(&done, kTickets, Scope::kRank, kSite));
  for (const int32_t times : claims) ASSERT_EQ(times, 1);
  for (std::thread& writer : writers) writer.join();
}

TEST(Gate, DeadlineTellsAllRanksAndSaysWho) {
  Ranks ranks(3);
  HostMemory memory(kShortDeadline);
  Gate<HostMemory> gate(memory, ranks.controls(), 1, 3);
  const uint32_t flag = 5;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(gate.wait(&flag, uint32_t{7}, Scope::kSystem, {WaitTask::kSumTokens, 4, FlagKind::kArrived, 9, 2}));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::duration<double>(kShortDeadline));
  EXPECT_EQ(describe(gate.report(), 1, kShortDeadline),
            "rank 1 stalled in sum_tokens (task 4): flag arrived[9], written by rank 2, should be 7 and is 5 after the "
            "deadline of 0.05 s; the group is finished: find out why that rank is missing, then make a new group");
  for (int32_t rank = 0; rank < ranks.size(); ++rank) EXPECT_EQ(ranks.controls()[rank]->abort, encode_abort(1, 2));
}

// Rank 0 waits for rank 1, which waits for rank 2, which is dead: rank 0 must hear of rank 2.
TEST(Gate, AWaiterHearsWhomTheRankThatGaveUpWasWaitingFor) {
  Ranks ranks(3);
  HostMemory memory(kShortDeadline);
  const uint32_t flag = 0;
  Gate<HostMemory> first(memory, ranks.controls(), 1, 3);
  EXPECT_FALSE(first.wait(&flag, uint32_t{1}, Scope::kSystem, {WaitTask::kForward, -1, FlagKind::kEntry, -1, 2}));
  Gate<HostMemory> second(memory, ranks.controls(), 0, 3);
  EXPECT_FALSE(second.wait(&flag, uint32_t{1}, Scope::kSystem, {WaitTask::kForward, -1, FlagKind::kEntry, -1, 1}));
  EXPECT_NE(describe(second.report(), 0, kShortDeadline).find("rank 1 had given up before, waiting for rank 2"),
            std::string::npos);
}

TEST(Gate, AbortEndsEveryWaitLongBeforeItsDeadline) {
  Ranks ranks(4);
  std::vector<StallReport> reports(4);
  ranks.run([&](int32_t rank) {
    HostMemory memory(rank == 2 ? kShortDeadline : kLongDeadline);
    Gate<HostMemory> gate(memory, ranks.controls(), rank, 4);
    const uint32_t flag = 0;
    EXPECT_FALSE(gate.wait(&flag, uint32_t{1}, Scope::kRank, kSite));
    reports[static_cast<size_t>(rank)] = gate.report();
  });
  for (int32_t rank = 0; rank < 4; ++rank) {
    const StallReport& report = reports[static_cast<size_t>(rank)];
    EXPECT_TRUE(report.stalled);
    EXPECT_EQ(report.aborted_by, rank == 2 ? -1 : 2);
  }
  EXPECT_EQ(describe(reports[0], 0, kLongDeadline),
            "rank 0 stalled in gate_up (task 12): flag rows_ready[3] should be 1 and is 0; rank 2 had given up before; "
            "the group is finished: find out why that rank is missing, then make a new group");
}

TEST(Gate, WaitsForTheHighHalfOfAWord) {
  Ranks ranks(1);
  HostMemory memory(kShortDeadline);
  Gate<HostMemory> gate(memory, ranks.controls(), 0, 1);
  const uint64_t word = uint64_t{0xFFFFFFFF} << 32 | 0x12345678;
  EXPECT_TRUE(gate.wait(&word, uint64_t{0xFFFFFFFF}, Scope::kRank, kSite, 32));
  EXPECT_FALSE(gate.wait(&word, uint64_t{0xFFFFFFFE}, Scope::kRank, kSite, 32));
  EXPECT_EQ(gate.report().seen, 0xFFFFFFFFu);
}

TEST(Stall, EveryTaskAndFlagHasAName) {
  for (int32_t task = 0; task <= static_cast<int32_t>(WaitTask::kDrain); ++task) {
    EXPECT_NE(std::string(task_name(static_cast<WaitTask>(task))), "unknown") << task;
  }
  for (int32_t flag = 0; flag <= static_cast<int32_t>(FlagKind::kGridBarrier); ++flag) {
    EXPECT_NE(std::string(flag_name(static_cast<FlagKind>(flag))), "unknown") << flag;
  }
  StallReport report;
  report.site = {WaitTask::kForward, -1, FlagKind::kEntry, -1, 3};
  report.expected = 8;
  const std::string text = describe(report, 0, 300);
  EXPECT_EQ(text.find("rank 0 stalled in forward: flag entry, written by rank 3, should be 8 and is 0 after"), 0u)
      << text;
}

TEST(RankBarrier, CallsSurviveTheirEncoding) {
  for (const CallKind kind : {CallKind::kCreate, CallKind::kBackward, CallKind::kRefuse}) {
    for (const uint32_t fingerprint : {0U, 1U, 0xFFFFFFU}) {
      const Call call = decode_call(encode_call({kind, fingerprint}));
      EXPECT_EQ(call.kind, kind);
      EXPECT_EQ(call.fingerprint, fingerprint);
    }
  }
  EXPECT_EQ(decode_call(encode_call({CallKind::kForward, 0x12345678})).fingerprint, 0x345678u);
}

// What a rank brings lies in plain memory, in the bank of the epoch: the barrier alone orders it, and two banks are
// enough however far a rank runs ahead.
TEST(RankBarrier, EveryoneReadsWhatEveryoneBrought) {
  constexpr uint32_t kEpochs = 400;
  Ranks ranks(4);
  int64_t brought[kNumBanks][4] = {};
  ranks.run([&](int32_t rank) {
    HostMemory memory(kLongDeadline);
    Gate<HostMemory> gate(memory, ranks.controls(), rank, ranks.size());
    for (uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
      brought[epoch % kNumBanks][rank] = int64_t{epoch} * 10 + rank;
      const auto kind = (epoch + static_cast<uint32_t>(rank)) % 5 == 0 ? CallKind::kRefuse : CallKind::kForward;
      arrive(memory, ranks.controls(), rank, ranks.size(), epoch, {kind, epoch});
      Call calls[kMaxRanks];
      ASSERT_TRUE(await_all(memory, gate, ranks.controls(), rank, ranks.size(), epoch, WaitTask::kForward, calls));
      for (int32_t peer = 0; peer < ranks.size(); ++peer) {
        ASSERT_EQ(brought[epoch % kNumBanks][peer], int64_t{epoch} * 10 + peer);
        ASSERT_EQ(calls[peer].fingerprint, epoch);
        const bool refuses = (epoch + static_cast<uint32_t>(peer)) % 5 == 0;
        ASSERT_EQ(calls[peer].kind, refuses ? CallKind::kRefuse : CallKind::kForward);
      }
    }
  });
}

// A refusal does not wait for the others; the next call of that rank does, before it touches a bank.
TEST(RankBarrier, RefusalsAreReadBeforeTheirBankIsUsedAgain) {
  constexpr uint32_t kEpochs = 300;
  Ranks ranks(3);
  const auto refuses = [](int32_t rank, uint32_t epoch) { return epoch % 3 == static_cast<uint32_t>(rank); };
  ranks.run([&](int32_t rank) {
    HostMemory memory(kLongDeadline);
    Gate<HostMemory> gate(memory, ranks.controls(), rank, ranks.size());
    Call calls[kMaxRanks];
    const auto await = [&](uint32_t epoch) {
      return await_all(memory, gate, ranks.controls(), rank, ranks.size(), epoch, WaitTask::kRefuse, calls);
    };
    for (uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
      ASSERT_TRUE(epoch == 1 || !refuses(rank, epoch - 1) || await(epoch - 1));
      char* text = ranks.controls()[rank]->refusal[epoch % kNumBanks];
      if (refuses(rank, epoch)) std::snprintf(text, kMaxRefusalBytes, "rank %d, call %u", rank, epoch);
      const CallKind kind = refuses(rank, epoch) ? CallKind::kRefuse : CallKind::kForward;
      arrive(memory, ranks.controls(), rank, ranks.size(), epoch, {kind, 0});
      if (refuses(rank, epoch)) continue;
      ASSERT_TRUE(await(epoch));
      for (int32_t peer = 0; peer < ranks.size(); ++peer) {
        ASSERT_EQ(calls[peer].kind == CallKind::kRefuse, refuses(peer, epoch));
        if (!refuses(peer, epoch)) continue;
        const std::string expected = "rank " + std::to_string(peer) + ", call " + std::to_string(epoch);
        ASSERT_EQ(std::string(ranks.controls()[peer]->refusal[epoch % kNumBanks]), expected);
      }
    }
  });
}

TEST(RankBarrier, ARankThatStaysAwayIsNamed) {
  Ranks ranks(3);
  std::vector<StallReport> reports(3);
  ranks.run([&](int32_t rank) {
    if (rank == 1) return;
    HostMemory memory(kShortDeadline);
    Gate<HostMemory> gate(memory, ranks.controls(), rank, ranks.size());
    arrive(memory, ranks.controls(), rank, ranks.size(), 6, {CallKind::kBackward, 0});
    Call calls[kMaxRanks];
    EXPECT_FALSE(await_all(memory, gate, ranks.controls(), rank, ranks.size(), 6, WaitTask::kBackward, calls));
    reports[static_cast<size_t>(rank)] = gate.report();
  });
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_TRUE(reports[rank].stalled);
    EXPECT_EQ(reports[rank].site.peer, 1);
    EXPECT_EQ(reports[rank].site.flag, FlagKind::kEntry);
    EXPECT_EQ(reports[rank].expected, 6u);
    EXPECT_EQ(reports[rank].seen, 0u);
  }
}

}  // namespace
}  // namespace weft
