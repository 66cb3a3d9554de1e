// FaultyMemory: ModelMemory with one fault, as a wrong port of the protocol would have it. The roles stay untouched: a
// fault is a wrong memory operation, picked out by the flag that it concerns - or, for fences, waits for copies and
// clearing, by the flag that the worker passed last.
#pragma once

#include <cstdint>

#include "protocol/model_memory.hpp"
#include "protocol/rank_barrier.hpp"

namespace weft::explore {

enum class FaultKind {
  kNone,
  kRelaxedAcquire,  // the gate polls and goes on
  kRelaxedRelease,  // the flag is raised with nothing ordered before it
  kNarrowRelease,   // ... ordered for the threads of the own rank only
  kNarrowAcquire,
  kSkippedWait,  // the gate takes the flag for raised
  kWrongCount,   // release_add adds one too many
  kNoProxyFence,
  kNoCopyWait,
  kCopyReadWait,    // waits until the sources have been read, not until the copies have landed
  kNoClear,         // the leader does not clear the bank of the next pass
  kClearsThisBank,  // the leader clears the bank of the pass it opens instead, after opening it
  kSplitClaim,      // reads the ticket, then writes it
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  FlagKind flag = FlagKind::kEntry;
  uint64_t raised = 0;  // kSkippedWait of a counter: what the gate waits for
};

class FaultyMemory : public ModelMemory {
 public:
  FaultyMemory(const ModelMemory& memory, const Fault& fault, uint32_t epoch)
      : ModelMemory(memory), fault_(fault), epoch_(epoch) {}

  template <class Word>
  Word poll(const Word* flag) {
    const Word value = ModelMemory::poll(flag);
    if (!concerns(FaultKind::kSkippedWait, flag)) return value;
    switch (fault_.flag) {
      case FlagKind::kEntry:
        return static_cast<Word>(uint64_t{epoch_} << 32 | encode_call({CallKind::kForward, 0}));
      case FlagKind::kPullsDone:
      case FlagKind::kArrived:
        return static_cast<Word>(epoch_);
      default:
        return static_cast<Word>(fault_.raised);
    }
  }
  template <class Word>
  Word acquire(const Word* flag, Scope scope) {
    last_flag_ = machine_.flag_kind(flag);
    if (concerns(FaultKind::kNarrowAcquire, flag)) scope = Scope::kRank;
    const bool relaxed = concerns(FaultKind::kRelaxedAcquire, flag) || concerns(FaultKind::kSkippedWait, flag);
    return static_cast<Word>(machine_.acquire(worker_, flag, scope, relaxed));
  }
  template <class Word>
  void release(Word* flag, Word value, Scope scope) {
    if (concerns(FaultKind::kNarrowRelease, flag)) scope = Scope::kRank;
    machine_.release(worker_, flag, value, scope, concerns(FaultKind::kRelaxedRelease, flag));
    if (late_clear_count_ > 0) ModelMemory::clear(late_clear_, late_clear_count_);
    late_clear_count_ = 0;
  }
  void release_add(uint32_t* flag, uint32_t value, Scope scope) {
    machine_.release_add(worker_, flag, value + (concerns(FaultKind::kWrongCount, flag) ? 1 : 0), scope,
                         concerns(FaultKind::kRelaxedRelease, flag));
  }
  uint32_t claim(uint32_t* ticket) {
    if (fault_.kind != FaultKind::kSplitClaim) return ModelMemory::claim(ticket);
    const uint32_t value = ModelMemory::poll(ticket);
    ModelMemory::release(ticket, value + 1, Scope::kRank);
    return value;
  }
  void clear(uint32_t* words, int64_t count) {
    const bool at_start = !launched_;  // of the launch, where both banks are cleared at once
    launched_ = true;
    if (!at_start && fault_.kind == FaultKind::kNoClear) return;
    if (!at_start && fault_.kind == FaultKind::kClearsThisBank) {
      opens_odd_pass_ = !opens_odd_pass_;
      late_clear_ = opens_odd_pass_ ? words - count : words + count;
      late_clear_count_ = count;
      return;
    }
    ModelMemory::clear(words, count);
  }
  void fence_async_proxy() {
    if (!follows(FaultKind::kNoProxyFence)) ModelMemory::fence_async_proxy();
  }
  void wait_copies() {
    if (follows(FaultKind::kNoCopyWait)) return;
    machine_.wait_copies(worker_, follows(FaultKind::kCopyReadWait));
  }

 private:
  bool concerns(FaultKind kind, const void* flag) const {
    return fault_.kind == kind && machine_.flag_kind(flag) == static_cast<int32_t>(fault_.flag);
  }
  bool follows(FaultKind kind) const { return fault_.kind == kind && last_flag_ == static_cast<int32_t>(fault_.flag); }

  Fault fault_;
  uint32_t epoch_;
  int32_t last_flag_ = -1;
  bool launched_ = false;
  bool opens_odd_pass_ = false;
  uint32_t* late_clear_ = nullptr;
  int64_t late_clear_count_ = 0;
};

}  // namespace weft::explore
