// Processes of one machine: every rank makes named segments of POSIX shared memory and maps its peers'. Names exist
// only until all ranks have mapped, so that nothing is left behind by a group that dies later. Where it dies before,
// its survivors take the names of the dead away.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/status.hpp"
#include "symmetric/memory.hpp"

namespace weft {
namespace {

// One mapped segment; unmapped when it goes.
class Segment {
 public:
  Segment() = default;
  Segment(int descriptor, int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    const int error = errno;
    ::close(descriptor);
    require(address != MAP_FAILED, WEFT_OUT_OF_MEMORY, "cannot map ", bytes,
            " bytes of shared memory: ", std::strerror(error));
    address_ = static_cast<std::byte*>(address);
  }
  Segment(Segment&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Segment& operator=(Segment&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Segment() {
    if (address_ != nullptr) ::munmap(address_, bytes_);
  }
  std::byte* address() const { return address_; }

 private:
  std::byte* address_ = nullptr;
  size_t bytes_ = 0;
};

Segment create_segment(const std::string& name, int64_t bytes) {
  const int descriptor = ::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  require(descriptor >= 0, WEFT_INVALID_ARGUMENT, "cannot create shared memory \"", name, "\": ", std::strerror(errno),
          "; group names must be new, without '/', and at most 200 characters");
  // Reserve the pages now: a full file system is an error here and a SIGBUS later.
  const int error = ::posix_fallocate(descriptor, 0, bytes);
  if (error != 0) {
    ::close(descriptor);
    ::shm_unlink(name.c_str());
    throw Error(WEFT_OUT_OF_MEMORY, words("cannot reserve ", bytes, " bytes of shared memory: ", std::strerror(error),
                                          "; enlarge /dev/shm (containers: --shm-size) or lower max_tokens"));
  }
  return Segment(descriptor, bytes);
}

// Descriptor of a peer's segment, or -1 while the peer has not made it or not yet given it its size.
int try_open_segment(const std::string& name, int64_t bytes) {
  const int descriptor = ::shm_open(name.c_str(), O_RDWR, 0600);
  if (descriptor < 0) return -1;
  struct stat status {};
  if (::fstat(descriptor, &status) == 0 && status.st_size >= bytes) return descriptor;
  ::close(descriptor);
  return -1;
}

// Names of all ranks' segments that may still be visible. Once all have mapped, each rank unlinks its own; where that
// never comes, also when a constructor throws half-way, this object unlinks the peers' too, as one of them may be dead.
class VisibleNames {
 public:
  VisibleNames() = default;
  VisibleNames(const VisibleNames&) = delete;
  VisibleNames& operator=(const VisibleNames&) = delete;
  ~VisibleNames() { unlink_all(); }
  void add(const std::string& name, bool is_own) { (is_own ? own_ : peers_).push_back(name); }
  // Not the peers': a fast one may already be making a new group of the same name.
  void unlink_own() {
    unlink(own_);
    peers_.clear();
  }
  void unlink_all() {
    unlink(own_);
    unlink(peers_);
  }

 private:
  static void unlink(std::vector<std::string>& names) {
    for (const std::string& name : names) ::shm_unlink(name.c_str());
    names.clear();
  }

  std::vector<std::string> own_;
  std::vector<std::string> peers_;
};

class SharedMemory final : public SymmetricMemory {
 public:
  SharedMemory(std::string name, int32_t rank, int32_t num_ranks, double deadline_s)
      : SymmetricMemory(rank, num_ranks), name_(std::move(name)), deadline_s_(deadline_s) {
    const auto bytes = static_cast<int64_t>(sizeof(ControlBlock));
    control_segments_.resize(controls_.size());
    make_own(control_segments_, "control", bytes);
    open_peers(control_segments_, "control", bytes);
    for (size_t peer = 0; peer < controls_.size(); ++peer) {
      controls_[peer] = reinterpret_cast<ControlBlock*>(control_segments_[peer].address());
    }
  }

  void grow_own(int64_t flag_bytes, int64_t data_bytes) override {
    ++generation_;
    new_flag_segments_ = std::vector<Segment>(controls_.size());
    new_data_segments_ = std::vector<Segment>(controls_.size());
    make_own(new_flag_segments_, "flags", flag_bytes);
    make_own(new_data_segments_, "data", data_bytes);
    grown_flag_bytes_ = flag_bytes;
    grown_data_bytes_ = data_bytes;
  }
  void map_peers() override {
    open_peers(new_flag_segments_, "flags", grown_flag_bytes_);
    open_peers(new_data_segments_, "data", grown_data_bytes_);
    for (size_t peer = 0; peer < controls_.size(); ++peer) {
      new_flags_[peer] = new_flag_segments_[peer].address();
      new_data_[peer] = new_data_segments_[peer].address();
    }
  }
  void finish_mapping() override {
    visible_names_.unlink_own();
    flag_segments_ = std::exchange(new_flag_segments_, {});
    data_segments_ = std::exchange(new_data_segments_, {});
    turn_over();
  }

 private:
  std::string segment_name(int32_t rank, const char* area) const {
    return words("/weft-", name_, "-", rank, "-", area, "-", generation_);
  }
  void make_own(std::vector<Segment>& segments, const char* area, int64_t bytes) {
    segments[static_cast<size_t>(rank_)] = create_segment(segment_name(rank_, area), bytes);
    // Only now: a name that was taken is another group's, and so are its peers'.
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      visible_names_.add(segment_name(rank, area), rank == rank_);
    }
  }
  void open_peers(std::vector<Segment>& segments, const char* area, int64_t bytes) {
    const auto begin = std::chrono::steady_clock::now();
    for (int32_t peer = 0; peer < num_ranks(); ++peer) {
      if (peer == rank_) continue;
      int descriptor = try_open_segment(segment_name(peer, area), bytes);
      while (descriptor < 0) {
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
        if (waited.count() >= deadline_s_) {
          visible_names_.unlink_all();
          throw Error(WEFT_STALLED, words("rank ", peer, " of group \"", name_, "\" did not bring its ", area,
                                          " memory within ", deadline_s_, " s; is it running?"));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        descriptor = try_open_segment(segment_name(peer, area), bytes);
      }
      segments[static_cast<size_t>(peer)] = Segment(descriptor, bytes);
    }
  }

  std::string name_;
  double deadline_s_;
  int32_t generation_ = 0;
  VisibleNames visible_names_;
  std::vector<Segment> control_segments_;
  std::vector<Segment> flag_segments_;
  std::vector<Segment> data_segments_;
  std::vector<Segment> new_flag_segments_;
  std::vector<Segment> new_data_segments_;
};

}  // namespace

std::unique_ptr<SymmetricMemory> make_shared_memory(const std::string& name, int32_t rank, int32_t num_ranks,
                                                    double deadline_s) {
  return std::make_unique<SharedMemory>(name, rank, num_ranks, deadline_s);
}

}  // namespace weft
