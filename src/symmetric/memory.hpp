// SymmetricMemory: memory that every rank of a group maps: a fixed control block a rank, and flag and data areas that
// grow to what the largest layer needs. A provider only makes and maps memory; when ranks meet is the caller's affair.
//
// Growing takes three steps with a rank barrier after each: grow_own, map_peers, finish_mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout/symmetric.hpp"

namespace weft {

class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;

  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return static_cast<int32_t>(controls_.size()); }
  int64_t flag_bytes() const { return flag_bytes_; }
  int64_t data_bytes() const { return data_bytes_; }

  // Whether all ranks are of this process by the way the group was made.
  virtual bool is_in_process() const { return false; }

  // Base addresses of every rank's areas as mapped here; indexed by rank.
  ControlBlock* const* controls() const { return controls_.data(); }
  std::byte* const* flags() const { return flags_.data(); }
  std::byte* const* data() const { return data_.data(); }

  // Makes this rank's new areas, zeroed. Throws Error(WEFT_OUT_OF_MEMORY) with the bytes.
  virtual void grow_own(int64_t flag_bytes, int64_t data_bytes) = 0;
  // Maps the peers' new areas; every rank has grown.
  virtual void map_peers() = 0;
  // Turns to what was mapped and gives back the old areas; every rank has mapped.
  virtual void finish_mapping() = 0;

 protected:
  SymmetricMemory(int32_t rank, int32_t num_ranks)
      : rank_(rank),
        controls_(static_cast<size_t>(num_ranks)),
        flags_(static_cast<size_t>(num_ranks)),
        data_(static_cast<size_t>(num_ranks)),
        new_flags_(static_cast<size_t>(num_ranks)),
        new_data_(static_cast<size_t>(num_ranks)) {}

  // Puts in force what has been grown and mapped. Only when every rank has: a rank that could not must find the others
  // where they were.
  void turn_over() {
    flags_ = new_flags_;
    data_ = new_data_;
    flag_bytes_ = grown_flag_bytes_;
    data_bytes_ = grown_data_bytes_;
  }

  int32_t rank_;
  int64_t flag_bytes_ = 0;
  int64_t data_bytes_ = 0;
  // What grow_own has made and map_peers has mapped; in force after turn_over.
  int64_t grown_flag_bytes_ = 0;
  int64_t grown_data_bytes_ = 0;
  std::vector<ControlBlock*> controls_;
  std::vector<std::byte*> flags_;
  std::vector<std::byte*> data_;
  std::vector<std::byte*> new_flags_;
  std::vector<std::byte*> new_data_;
};

// All ranks in this process; element r is rank r's.
std::vector<std::unique_ptr<SymmetricMemory>> make_in_process_memory(int32_t num_ranks);

// One rank a process, over POSIX shared memory. Returns when every rank's control block is mapped here; throws
// Error(WEFT_STALLED) naming the missing rank when `deadline_s` has passed. Names are visible until finish_mapping.
std::unique_ptr<SymmetricMemory> make_shared_memory(const std::string& name, int32_t rank, int32_t num_ranks,
                                                    double deadline_s);

}  // namespace weft
