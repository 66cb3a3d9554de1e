// The flags inside one rank: tickets and ready counters of a pass. Two banks: pass p counts in bank p % 2 while the
// leader clears the other one for pass p + 1. They lie in the caller's workspace, whose contents nobody trusts: the
// launch clears both banks before its first pass.
#pragma once

#include <cstdint>

#include "layout/carver.hpp"
#include "layout/symmetric.hpp"

namespace weft {

enum class FlagKind : int32_t {
  kEntry,        // ControlBlock::entry: a peer has arrived at the collective call
  kPullsDone,    // ControlBlock::pulls_done: a peer has read this rank's staging
  kArrived,      // SymmetricFlags::arrived: a partial row of an own token has come home
  kRowsReady,    // rows of a block that have been pulled
  kZReady,       // tiles of a block: z, where a backward makes it again
  kMidReady,     // tiles of a block: a' in forward, dz in backward
  kOutReady,     // tiles of a block: o in forward, dx rows in backward
  kPulled,       // pull tasks finished
  kPassOpen,     // the pass that the leader has opened
  kWorkersDone,  // workers that have left the pass
  kGridBarrier,  // ControlBlock::grid_arrived: blocks of a kernel that have reached a point
};

struct PassFlags {
  uint32_t* matrix_ticket;  // [1]
  uint32_t* comm_ticket;    // [1]
  uint32_t* pulled;         // [1]
  uint32_t* workers_done;   // [1]
  uint32_t* rows_ready;     // [capacity_blocks]
  uint32_t* z_ready;        // [capacity_blocks]
  uint32_t* mid_ready;      // [capacity_blocks]
  uint32_t* out_ready;      // [kMaxParts, capacity_blocks]
};

struct LocalFlags {
  PassFlags banks[kNumBanks];
  uint32_t* pass_open;  // [1] 1 + the pass that workers may enter; shared by both banks
  uint32_t* words;      // every word above, for clearing
  int64_t words_per_bank;

  WEFT_HD const PassFlags& of_pass(int32_t pass) const { return banks[pass % kNumBanks]; }
  WEFT_HD uint32_t* bank_words(int32_t pass) const { return words + (pass % kNumBanks) * words_per_bank; }
};

WEFT_HD inline LocalFlags carve_local_flags(Carver& carver, const LayerShape& shape) {
  constexpr int64_t kCounters = 4;
  LocalFlags flags{};
  flags.words_per_bank = kCounters + (3 + kMaxParts) * int64_t{shape.capacity_blocks};
  flags.words = carver.take<uint32_t>(kNumBanks * flags.words_per_bank + 1);
  if (flags.words == nullptr) return flags;  // measuring
  for (int32_t bank = 0; bank < kNumBanks; ++bank) {
    uint32_t* word = flags.words + bank * flags.words_per_bank;
    uint32_t* blocks = word + kCounters;
    flags.banks[bank] = {word,
                         word + 1,
                         word + 2,
                         word + 3,
                         blocks,
                         blocks + shape.capacity_blocks,
                         blocks + 2 * int64_t{shape.capacity_blocks},
                         blocks + 3 * int64_t{shape.capacity_blocks}};
  }
  flags.pass_open = flags.words + kNumBanks * flags.words_per_bank;
  return flags;
}

}  // namespace weft
