// Mutations: each fence, wait, clear, count, bank and scope of the protocol, left out or done wrong in the smallest
// call in which it matters. The explorer must fail, and in the way that the table says. The same calls without a fault
// pass.
#include <gtest/gtest.h>

#include <cctype>
#include <ostream>
#include <string>
#include <vector>

#include "protocol/faulty_memory.hpp"
#include "protocol/toy_barrier.hpp"
#include "protocol/toy_cases.hpp"

namespace weft::explore {
namespace {

struct Mutation {
  const char* name;
  Fault fault;
  ToyCase toy;
  Verdict verdict;
};
void PrintTo(const Mutation& mutation, std::ostream* out) { *out << mutation.name; }

constexpr int64_t kMaxExecutions = 3000;
constexpr int32_t kWalks = 1000;

Outcome explore(const ToyCase& toy, const Fault& fault) {
  ToyLayer<FaultyMemory> layer(
      toy, [&](const ModelMemory& memory, uint32_t epoch) { return FaultyMemory(memory, fault, epoch); });
  // Most faults need no preemption, and then the trace is short. Walks find soon what a search would meet late.
  Limits no_preemption;
  no_preemption.max_preemptions = 0;
  no_preemption.max_executions = kMaxExecutions;
  Limits walks;
  walks.random_walks = kWalks;
  Limits search;
  search.max_preemptions = 1;
  search.max_executions = kMaxExecutions;
  Outcome outcome;
  for (const Limits& limits : {no_preemption, walks, search}) {
    outcome = layer.explore(limits);
    if (outcome.verdict != Verdict::kPass) break;
  }
  return outcome;
}

// The calls. Two comm workers where one alone would be ordered by itself.
const ToyCase kOnePass = one_pass(kForwardCall);
const ToyCase kOnePassBackward = one_pass(kBackwardCall);
const ToyCase kTwoLaunches = two_launches(kForwardCall, kForwardCall);
const ToyCase kOnlyWgrads = two_launches(kWeightGradientCall, kWeightGradientCall);
const ToyCase kOnlyWgradsTwoComm = with_workers(kOnlyWgrads, 2, 1);
const ToyCase kThreePasses = three_passes(kForwardCall);
const ToyCase kRowCopies = with_row_copies(kOnePass);
const ToyCase kThreePassesCopies = with_row_copies(kThreePasses);
const ToyCase kThreePassesTwoComm = with_workers(kThreePassesCopies, 2, 1);
const ToyCase kThreePassesOnlyWgrads = with_row_copies(three_passes(kWeightGradientCall));
const ToyCase kTwoMatrixWorkers = with_workers(kOnePass, 1, 2);
const ToyCase kTwoMatrixWorkersBackward = with_workers(kOnePassBackward, 1, 2);

std::vector<Mutation> mutations() {
  using F = FaultKind;
  using K = FlagKind;
  constexpr Verdict kRace = Verdict::kRace;
  constexpr Verdict kDeadlock = Verdict::kDeadlock;
  constexpr Verdict kWrong = Verdict::kWrongValue;
  return {
      {"relaxed acquire of entry", {F::kRelaxedAcquire, K::kEntry}, kOnePass, kRace},
      {"relaxed acquire of pulls_done", {F::kRelaxedAcquire, K::kPullsDone}, kOnlyWgrads, kRace},
      {"relaxed acquire of arrived", {F::kRelaxedAcquire, K::kArrived}, kOnePass, kRace},
      {"relaxed acquire of rows_ready", {F::kRelaxedAcquire, K::kRowsReady}, kOnePass, kRace},
      {"relaxed acquire of mid_ready", {F::kRelaxedAcquire, K::kMidReady}, kTwoMatrixWorkers, kRace},
      {"relaxed acquire of out_ready", {F::kRelaxedAcquire, K::kOutReady}, kOnePass, kRace},
      {"relaxed acquire of pulled", {F::kRelaxedAcquire, K::kPulled}, kOnlyWgradsTwoComm, kRace},
      {"relaxed acquire of pass_open", {F::kRelaxedAcquire, K::kPassOpen}, kThreePasses, kRace},
      {"relaxed acquire of workers_done", {F::kRelaxedAcquire, K::kWorkersDone}, kThreePasses, kRace},

      {"relaxed release of entry", {F::kRelaxedRelease, K::kEntry}, kOnePass, kRace},
      {"relaxed release of pulls_done", {F::kRelaxedRelease, K::kPullsDone}, kOnlyWgrads, kRace},
      {"relaxed release of arrived", {F::kRelaxedRelease, K::kArrived}, kOnePass, kRace},
      {"relaxed release of rows_ready", {F::kRelaxedRelease, K::kRowsReady}, kOnePass, kRace},
      {"relaxed release of mid_ready", {F::kRelaxedRelease, K::kMidReady}, kTwoMatrixWorkers, kRace},
      {"relaxed release of out_ready", {F::kRelaxedRelease, K::kOutReady}, kOnePass, kRace},
      {"relaxed release of pulled", {F::kRelaxedRelease, K::kPulled}, kOnlyWgradsTwoComm, kRace},
      {"relaxed release of pass_open", {F::kRelaxedRelease, K::kPassOpen}, kThreePasses, kRace},
      {"relaxed release of workers_done", {F::kRelaxedRelease, K::kWorkersDone}, kThreePasses, kRace},

      {"entry released for its own rank only", {F::kNarrowRelease, K::kEntry}, kOnePass, kRace},
      {"pulls_done released for its own rank only", {F::kNarrowRelease, K::kPullsDone}, kOnlyWgrads, kRace},
      {"arrived released for its own rank only", {F::kNarrowRelease, K::kArrived}, kOnePass, kRace},
      {"entry acquired from its own rank only", {F::kNarrowAcquire, K::kEntry}, kOnePass, kRace},
      {"pulls_done acquired from its own rank only", {F::kNarrowAcquire, K::kPullsDone}, kOnlyWgrads, kRace},
      {"arrived acquired from its own rank only", {F::kNarrowAcquire, K::kArrived}, kOnePass, kRace},

      {"no wait for entry", {F::kSkippedWait, K::kEntry}, kOnePass, kRace},
      {"no drain: staging written over", {F::kSkippedWait, K::kPullsDone}, kOnlyWgrads, kRace},
      {"no wait for arrived", {F::kSkippedWait, K::kArrived}, kOnePass, kWrong},
      {"no wait for rows_ready", {F::kSkippedWait, K::kRowsReady, kBlockRows}, kOnePass, kRace},
      {"no wait for mid_ready", {F::kSkippedWait, K::kMidReady, 1}, kTwoMatrixWorkers, kRace},
      {"no wait for out_ready", {F::kSkippedWait, K::kOutReady, 1}, kOnePass, kRace},
      {"pulls_done announced without waiting", {F::kSkippedWait, K::kPulled, 1}, kOnlyWgradsTwoComm, kRace},
      {"leader does not wait for the workers", {F::kSkippedWait, K::kWorkersDone, 2}, kThreePasses, kRace},

      {"rows_ready counts one too many", {F::kWrongCount, K::kRowsReady}, kOnePass, kDeadlock},
      {"mid_ready counts one too many", {F::kWrongCount, K::kMidReady}, kOnePass, kDeadlock},
      {"out_ready counts one too many", {F::kWrongCount, K::kOutReady}, kOnePass, kDeadlock},
      {"pulled counts one too many", {F::kWrongCount, K::kPulled}, kOnePass, kDeadlock},
      {"workers_done counts one too many", {F::kWrongCount, K::kWorkersDone}, kThreePasses, kDeadlock},

      {"no proxy fence before gate_up", {F::kNoProxyFence, K::kRowsReady}, kOnePass, kRace},
      {"no proxy fence before down", {F::kNoProxyFence, K::kMidReady}, kTwoMatrixWorkers, kRace},
      {"no proxy fence before combine", {F::kNoProxyFence, K::kOutReady}, kThreePassesTwoComm, kRace},
      {"no proxy fence before pull", {F::kNoProxyFence, K::kEntry}, kThreePassesOnlyWgrads, kRace},
      {"no wait for the tiles of gate_up", {F::kNoCopyWait, K::kRowsReady}, kTwoMatrixWorkers, kRace},
      {"no wait for the tiles of down", {F::kNoCopyWait, K::kMidReady}, kOnePass, kWrong},
      {"no wait for the tiles of wgrads", {F::kNoCopyWait, K::kMidReady}, kOnlyWgrads, kWrong},
      {"no wait for partial rows", {F::kNoCopyWait, K::kOutReady}, kRowCopies, kRace},
      {"no wait for pulled rows", {F::kNoCopyWait, K::kEntry}, kThreePassesCopies, kRace},
      {"tiles of gate_up only read", {F::kCopyReadWait, K::kRowsReady}, kTwoMatrixWorkers, kRace},
      {"tiles of down only read", {F::kCopyReadWait, K::kMidReady}, kOnePass, kWrong},
      {"tiles of down_dgrad only read", {F::kCopyReadWait, K::kRowsReady}, kTwoMatrixWorkersBackward, kRace},
      {"tiles of wgrads only read", {F::kCopyReadWait, K::kMidReady}, kOnlyWgrads, kWrong},
      {"partial rows only read", {F::kCopyReadWait, K::kOutReady}, kRowCopies, kRace},
      {"pulled rows only read", {F::kCopyReadWait, K::kEntry}, kThreePassesCopies, kRace},

      {"bank of the next pass not cleared", {F::kNoClear}, kThreePasses, kDeadlock},
      {"bank of the open pass cleared", {F::kClearsThisBank}, kThreePasses, kRace},
      {"ticket read, then written", {F::kSplitClaim}, kTwoMatrixWorkers, kRace},
  };
}

class MutationTest : public testing::TestWithParam<Mutation> {};

TEST_P(MutationTest, IsCaught) {
  const Mutation& mutation = GetParam();
  const Outcome outcome = explore(mutation.toy, mutation.fault);
  EXPECT_EQ(outcome.verdict, mutation.verdict) << verdict_name(outcome.verdict) << ": " << outcome.words;
  RecordProperty("caught_by", verdict_name(outcome.verdict));
}

std::string name_of(const testing::TestParamInfo<Mutation>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (!isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}
INSTANTIATE_TEST_SUITE_P(Protocol, MutationTest, testing::ValuesIn(mutations()), name_of);

TEST(Mutation, TheCallsPassWithoutAFault) {
  const ToyCase* const calls[] = {&kOnePass,
                                  &kOnePassBackward,
                                  &kTwoLaunches,
                                  &kOnlyWgrads,
                                  &kOnlyWgradsTwoComm,
                                  &kThreePasses,
                                  &kRowCopies,
                                  &kThreePassesCopies,
                                  &kThreePassesTwoComm,
                                  &kThreePassesOnlyWgrads,
                                  &kTwoMatrixWorkers,
                                  &kTwoMatrixWorkersBackward};
  for (const ToyCase* toy : calls) {
    const Outcome outcome = explore(*toy, {});
    ASSERT_EQ(outcome.verdict, Verdict::kPass) << verdict_name(outcome.verdict) << ": " << outcome.words;
  }
}

// Mutations of what surrounds the roles.

TEST(Mutation, EpochThatDoesNotAdvanceIsCaught) {
  ToyCase toy = kTwoLaunches;
  toy.epochs_advance = false;
  const Outcome outcome = explore(toy, {});
  EXPECT_EQ(outcome.verdict, Verdict::kWrongValue) << verdict_name(outcome.verdict) << ": " << outcome.words;
}

TEST(Mutation, OneBankOfArrivalsIsCaught) {
  constexpr CallKind kCreate = CallKind::kCreate;
  BarrierCase toy{{{kCreate, kCreate, kCreate}, {kCreate, kCreate, kCreate}}};
  EXPECT_EQ(ToyBarrier(toy).explore({}).verdict, Verdict::kPass);
  toy.epochs_a_call = 2;
  EXPECT_EQ(ToyBarrier(toy).explore({}).verdict, Verdict::kDeadlock);
}

TEST(Mutation, CallThatDoesNotAwaitTheRefusalBeforeItIsCaught) {
  constexpr CallKind kCreate = CallKind::kCreate;
  BarrierCase toy{{{kCreate, CallKind::kRefuse, kCreate}, {kCreate, kCreate, kCreate}}};
  EXPECT_EQ(ToyBarrier(toy).explore({}).verdict, Verdict::kPass);
  toy.awaits_refused_call = false;
  EXPECT_EQ(ToyBarrier(toy).explore({}).verdict, Verdict::kRace);
}

}  // namespace
}  // namespace weft::explore
