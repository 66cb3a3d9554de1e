// Gate: how a worker waits. Polls a flag of its own rank, looks at the abort word between polls, and gives up at the
// deadline with a stall report that says who waited for what. Never traps, never hangs.
#pragma once

#include <cstdint>

#include "layout/symmetric.hpp"
#include "protocol/flags.hpp"
#include "protocol/memory_policy.hpp"

namespace weft {

// What a worker does when it waits. An enum, because a kernel reports it to the host; the words lie in stall.cpp.
enum class WaitTask : int32_t {
  kGroupCreate,
  kLayerCreate,
  kGrowMemory,
  kMaxTokens,
  kForward,
  kBackward,
  kRefuse,
  kPlan,
  kEnterPass,
  kLeavePass,
  kGateUp,
  kDown,
  kDownDgrad,
  kGateUpDgrad,
  kDownWgrad,
  kGateUpWgrad,
  kDispatch,
  kPullsDone,
  kCombine,
  kSumTokens,
  kDrain,
};

struct WaitSite {
  WaitTask task;
  int32_t task_idx;  // its ticket; -1 outside the task stream
  FlagKind flag;
  int64_t flag_idx;  // block, token slot, ...; -1 where there is one such flag only
  int32_t peer;      // the rank that should have written it; -1: this rank itself
};

// The abort word: 1 + the rank that gave up, and above it 1 + the rank it gave up on (0: one of its own threads).
WEFT_HD constexpr uint32_t encode_abort(int32_t rank, int32_t peer) {
  return static_cast<uint32_t>(rank + 1) | static_cast<uint32_t>(peer + 1) << 16;
}

struct StallReport {
  WaitSite site{};
  uint64_t expected = 0;
  uint64_t seen = 0;
  int32_t aborted_by = -1;  // the rank that had given up before; -1: this one passed its own deadline
  int32_t blamed = -1;      // the rank that one had given up on; -1: one of its own threads
  bool stalled = false;
};

// `abort` is the word that ended the wait; 0: the wait passed its own deadline.
WEFT_HD inline StallReport stall_report(const WaitSite& site, uint64_t expected, uint64_t seen, uint32_t abort) {
  return {site, expected, seen, static_cast<int32_t>(abort & 0xFFFFU) - 1, static_cast<int32_t>(abort >> 16) - 1, true};
}

template <class Memory>
class Gate {
 public:
  // `controls` are all ranks' control blocks; a stall is announced in each.
  WEFT_HD Gate(Memory& memory, ControlBlock* const* controls, int32_t rank, int32_t num_ranks)
      : memory_(memory), controls_(controls), rank_(rank), num_ranks_(num_ranks) {}

  // Waits until (*flag >> shift) == expected, then orders all later accesses behind the writer's release. False after a
  // stall, which report() describes.
  template <class Word>
  WEFT_HD bool wait(const Word* flag, Word expected, Scope scope, const WaitSite& site, int32_t shift = 0) {
    Word seen = memory_.poll(flag) >> shift;
    for (int64_t spins = 0; seen != expected; ++spins) {
      const uint32_t abort = memory_.poll(&controls_[rank_]->abort);
      if (abort != 0 || !memory_.pause(spins)) return stall(site, expected, seen, abort);
      seen = memory_.poll(flag) >> shift;
    }
    memory_.acquire(flag, scope);
    return true;
  }

  WEFT_HD const StallReport& report() const { return report_; }

 private:
  WEFT_HD bool stall(const WaitSite& site, uint64_t expected, uint64_t seen, uint32_t abort) {
    report_ = stall_report(site, expected, seen, abort);
    if (abort == 0) {
      for (int32_t peer = 0; peer < num_ranks_; ++peer) {
        memory_.release(&controls_[peer]->abort, encode_abort(rank_, site.peer), Scope::kSystem);
      }
    }
    return false;
  }

  Memory& memory_;
  ControlBlock* const* controls_;
  int32_t rank_;
  int32_t num_ranks_;
  StallReport report_;
};

}  // namespace weft
