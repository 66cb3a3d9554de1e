// Rank barrier: where all ranks meet at a collective call. A rank arrives by writing one word into every peer's memory:
// the epoch and what it has come to do. Nobody waits behind the call: the barrier of the next one does that.
#pragma once

#include <cstdint>

#include "protocol/gate.hpp"

namespace weft {

enum class CallKind : uint32_t {
  kJoin = 1,
  kCreate,
  kGrow,
  kMapped,
  kForward,
  kBackward,
  kNextPass,
  kRefuse,
  kForwardLaunched,  // ranks that share a process have launched their kernels
  kBackwardLaunched,
  kMaxTokens,
};

// What a rank has come to do: the kind, and a fingerprint of everything the ranks must agree on.
struct Call {
  CallKind kind;
  uint32_t fingerprint;  // 24 bits
};

WEFT_HD constexpr uint32_t encode_call(const Call& call) {
  return (static_cast<uint32_t>(call.kind) << 24) | (call.fingerprint & 0xFFFFFFU);
}
WEFT_HD constexpr Call decode_call(uint32_t word) { return {static_cast<CallKind>(word >> 24), word & 0xFFFFFFU}; }

template <class Memory>
WEFT_HD void arrive_at(Memory& memory, ControlBlock* const* controls, int32_t rank, int32_t peer, uint32_t epoch,
                       const Call& call) {
  const uint64_t word = (uint64_t{epoch} << 32) | encode_call(call);
  memory.release(&controls[peer]->entry[epoch % kNumBanks][rank], word, Scope::kSystem);
}

template <class Memory>
WEFT_HD void arrive(Memory& memory, ControlBlock* const* controls, int32_t rank, int32_t num_ranks, uint32_t epoch,
                    const Call& call) {
  for (int32_t n = 1; n <= num_ranks; ++n) {  // peers first, each rank beginning with another one
    arrive_at(memory, controls, rank, (rank + n) % num_ranks, epoch, call);
  }
}

// Waits until every rank has arrived in `epoch`; calls[rank] is then what each has come to do.
template <class Memory>
WEFT_HD bool await_all(Memory& memory, Gate<Memory>& gate, ControlBlock* const* controls, int32_t rank,
                       int32_t num_ranks, uint32_t epoch, WaitTask task, Call* calls) {
  for (int32_t peer = 0; peer < num_ranks; ++peer) {
    const uint64_t* entry = &controls[rank]->entry[epoch % kNumBanks][peer];
    const WaitSite site{task, -1, FlagKind::kEntry, -1, peer};
    if (!gate.wait(entry, uint64_t{epoch}, Scope::kSystem, site, 32)) return false;
    calls[peer] = decode_call(static_cast<uint32_t>(memory.poll(entry)));
  }
  return true;
}

}  // namespace weft
