// RankGroup: this rank's membership of an expert-parallel group: symmetric memory, the epoch counter, and the meetings
// with which every collective call begins.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "core/status.hpp"
#include "layout/backend.hpp"
#include "protocol/rank_barrier.hpp"
#include "symmetric/device_memory.hpp"
#include "symmetric/memory.hpp"

namespace weft {

class RankGroup {
 public:
  // Ranks meet in `memory`, on the host. Layers that run on devices get theirs from `make_device_memory`.
  RankGroup(std::unique_ptr<SymmetricMemory> memory, double deadline_s, DeviceMemoryMaker make_device_memory = {})
      : memory_(std::move(memory)), deadline_s_(deadline_s), make_device_memory_(std::move(make_device_memory)) {}

  int32_t rank() const { return memory_->rank(); }
  int32_t num_ranks() const { return memory_->num_ranks(); }
  RankMemory rank_memory(MemoryKind kind) const;

  // The first meeting of ranks in different processes: after it nothing of the group has a name any more.
  void join();

  // Meets all ranks in the next epoch, which it returns. Throws Error: WEFT_STALLED if one stays away or the group is
  // finished, WEFT_PEER_REFUSED if one refuses, WEFT_INVALID_ARGUMENT if they have come to do different things.
  uint32_t meet(const Call& call, double deadline_s);

  // Answers the next meeting with a refusal and does not wait for it: this rank's next call does that first.
  void refuse(const std::string& reason, double deadline_s);

  // Runs what concerns this rank alone. If it throws, the peers, which are about to meet this rank, hear why.
  template <class Work>
  void or_refuse(double deadline_s, const Work& work) {
    try {
      work();
    } catch (const std::exception& error) {
      try {
        refuse(error.what(), deadline_s);
      } catch (const Error&) {
        // The peers are gone: what is wrong here is still the thing to say.
      }
      throw;
    }
  }

  // The passes after the first have had epochs of their own.
  void advance(int32_t num_epochs) { epoch_ += static_cast<uint32_t>(num_epochs); }

  // Meets to create a layer: throws Error on every rank, with the field and values, unless all bring the same
  // configuration but for ep_rank and what is a rank's own affair (schedule, workers, deadline).
  // Returns a fingerprint of what they agreed on.
  uint32_t agree_on(const weft_config& config, double deadline_s);

  // Meets to find the largest of the numbers of tokens that the ranks bring.
  int64_t agree_on_max_tokens(int64_t num_tokens, double deadline_s);

  // Before reserve: finds the device whose memory layers of this kind use, or throws if this rank cannot have it.
  void prepare_memory(MemoryKind kind);

  // Makes the symmetric areas at least this large. Collective; every rank asks for the same.
  void reserve(MemoryKind kind, int64_t flag_bytes, int64_t data_bytes, double deadline_s);

 private:
  void finish_refusal(double deadline_s);
  void await(uint32_t epoch, double deadline_s, WaitTask task, Call* calls);

  std::shared_ptr<SymmetricMemory> memory_;
  double deadline_s_;
  DeviceMemoryMaker make_device_memory_;
  std::unique_ptr<DeviceSymmetricMemory> device_memory_;  // null until a layer needs it, and for one rank
  uint32_t epoch_ = 0;
  bool refusal_unread_ = false;
};

}  // namespace weft
