// BackendLayer: what a backend gives the C ABI - one layer on one rank. The caller (api/) has validated the arguments
// and meets the other ranks between stage and forward or backward.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "layout/symmetric.hpp"
#include "weft/weft.h"

namespace weft {

enum class MemoryKind { kHost, kDevice };

// Base addresses of every rank's symmetric memory, as mapped here; those on a device are null for a group of one rank.
struct RankMemory {
  ControlBlock* const* controls;
  std::byte* const* flags;
  std::byte* const* data;
  int32_t ranks_on_device;   // of the group, this one included, that share this rank's device
  bool ranks_share_process;  // some ranks of the group are of one process; the same on every rank
  uint64_t ranks_together;   // this rank and those of this process on its device, a bit each: they launch as one
};

// Distinguishes the forwards of this process, so that a backward knows whose rows a workspace holds.
inline uint64_t next_generation() {
  static std::atomic<uint64_t> generation{0};
  return generation.fetch_add(1, std::memory_order_relaxed) + 1;
}

class BackendLayer {
 public:
  virtual ~BackendLayer() = default;

  // Bytes for weft_sizes; independent of routing.
  virtual int64_t workspace_bytes() const = 0;
  virtual int64_t forward_workspace_bytes() const { return workspace_bytes(); }
  virtual int64_t saved_bytes() const = 0;
  virtual int64_t symmetric_data_bytes() const = 0;
  virtual int64_t symmetric_flag_bytes() const = 0;
  // Where its symmetric memory lies.
  virtual MemoryKind memory_kind() const { return MemoryKind::kHost; }

  // Makes what outlives calls; when the layer is created, not when one is only asked for its sizes. All ranks have
  // agreed on the configuration, of which `fingerprint` is a hash.
  virtual void prepare(uint32_t /*fingerprint*/) {}

  // Throws the fault that a device has found since the last call, if any. Does not wait for it.
  virtual void check_reported() {}

  // Throws what only this backend asks of the arguments; before any rank is met.
  virtual void check_forward(const weft_forward_args&) {}
  virtual void check_backward(const weft_backward_args&) {}

  // Before the entry barrier: puts this rank's inputs where peers read them, and makes ready what this process
  // launches. A backward may already say its args.source.
  virtual void stage(const RankMemory& memory, weft_forward_args& args) = 0;
  virtual void stage(const RankMemory& memory, weft_backward_args& args) = 0;

  // Between the entry barrier of `epoch` and the return. They return the epochs (passes) used. Throw Error:
  // WEFT_STALLED when a peer stays away; WEFT_INVALID_ARGUMENT, on all ranks alike, for an expert index out of range.
  virtual int32_t forward(const RankMemory& memory, uint32_t epoch, weft_forward_args& args) = 0;
  virtual int32_t backward(const RankMemory& memory, uint32_t epoch, weft_backward_args& args) = 0;

  // This rank ends a call with an error, having staged for it: nothing of it may be launched from here on.
  virtual void leave() {}

  // Where ranks share a process: orders what follows in the caller's stream behind a forward or backward, which has
  // failed or which all ranks have launched.
  virtual void join(void* /*stream*/) {}
};

}  // namespace weft
