// Machine: the memory that the explorer's workers share, and what they know of each other. Flags and data with their
// values, asynchronous copies as two delayed steps, and vector clocks that say which accesses are ordered. It must not
// know the protocol or who runs when: a Scheduler decides that at every point where it matters.
//
// Clocks. A worker has a generic clock and a clock of the asynchronous proxy. A release joins the worker's generic
// clock into the flag, an acquire joins the flag into it; a relaxed poll joins nothing; additions continue what was
// released before. A proxy fence joins generic into asynchronous. Asynchronous operations start from the asynchronous
// clock, and only waiting for them joins them into the generic one. Two accesses of one datum, one of them a write,
// with neither before the other are a race, whichever came first this time.
//
// Because races are found from the order and not from bad luck, the coarsest grain of scheduling, synchronisation, is
// enough to find them: data accesses and the steps of copies may then keep to one place, copies as late as they can be.
// The finer grains let them happen anywhere, so that stale and torn results show by themselves too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "protocol/flags.hpp"
#include "protocol/memory_policy.hpp"

namespace weft::explore {

inline constexpr size_t kMaxWorkers = 9;

// What a component of a clock counts: a worker's ordinary accesses, its asynchronous operand loads, and the two halves
// of its asynchronous copies.
enum Part : size_t { kGeneric, kLoad, kCopyRead, kCopyWrite, kNumParts };
constexpr size_t component(size_t worker, Part part) { return worker * kNumParts + part; }

struct Clock {
  std::array<uint16_t, kMaxWorkers * kNumParts> at{};
  void join(const Clock& other) {
    for (size_t n = 0; n < at.size(); ++n) at[n] = at[n] < other.at[n] ? other.at[n] : at[n];
  }
};

// One access: the component that made it and that component's time.
struct Epoch {
  size_t component = 0;
  uint16_t time = 0;  // 0: no access yet
  bool before(const Clock& clock) const { return clock.at[component] >= time; }
};

constexpr uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b + 0x9E3779B97F4A7C15U + (a << 6) + (a >> 2))) * 0xFF51AFD7ED558CCDU;
  h = (h ^ (h >> 32)) * 0xC4CEB9FE1A85EC53U;
  return h ^ (h >> 29);
}

enum class Verdict { kPass, kRace, kWrongValue, kDeadlock, kLivelock };
inline const char* verdict_name(Verdict verdict) {
  constexpr const char* kNames[] = {"pass", "race", "wrong value", "dead-lock", "livelock"};
  return kNames[static_cast<size_t>(verdict)];
}

// What is a point of scheduling: only what orders accesses; the steps of copies as well; or every access.
enum class Grain { kSynchronisation, kCopies, kEveryAccess };

struct Action {
  enum class Kind : uint8_t { kWorker, kCopy, kDeadline } kind;
  uint8_t idx;
};

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual void reschedule() = 0;  // called on the stack of the running worker; returns when it may go on
  virtual void stop() = 0;        // the execution is over; does not return
};

class Machine {
 public:
  using Cell = int32_t;
  using Event = int32_t;

  explicit Machine(Scheduler& scheduler) : scheduler_(scheduler) {}

  // --- Construction. Workers with the same rank and role are interchangeable.
  int32_t add_worker(int32_t rank, std::string role) {
    const uint64_t kind = mix(static_cast<uint64_t>(rank), std::hash<std::string>{}(role));
    workers_.push_back({rank, words("rank ", rank, " ", role), kind});
    return static_cast<int32_t>(workers_.size()) - 1;
  }
  void add_flag(const void* address, std::string name, int32_t rank, FlagKind kind) {
    add_word(address, words(name, " of rank ", rank));
    words_.back().kind = static_cast<int32_t>(kind);
  }
  void add_word(const void* address, std::string name) {
    word_at_[address] = static_cast<int32_t>(words_.size());
    words_.emplace_back();
    word_names_.push_back(std::move(name));
  }
  Cell add_cells(std::string name, int32_t count) {
    cells_.resize(cells_.size() + static_cast<size_t>(count));
    for (int32_t n = 0; n < count; ++n) cell_names_.push_back(words(name, "[", n, "]"));
    return static_cast<Cell>(cells_.size()) - count;
  }
  Event add_event(std::string name) {
    events_.emplace_back();
    event_names_.push_back(std::move(name));
    return static_cast<Event>(events_.size()) - 1;
  }

  Grain grain = Grain::kSynchronisation;
  bool abort_words_are_points = false;
  bool finds_races = true;

  void reset();

  // --- What workers do. `w` is the running worker.
  uint64_t poll(int32_t w, const void* address);
  uint64_t acquire(int32_t w, const void* address, Scope scope, bool relaxed = false);
  void release(int32_t w, const void* address, uint64_t value, Scope scope, bool relaxed = false);
  void release_add(int32_t w, const void* address, uint64_t value, Scope scope, bool relaxed = false);
  uint64_t claim(int32_t w, const void* address);
  void clear(int32_t w, const void* address);
  bool pause(int32_t w);  // until one of the two words polled last changes; false: the deadline

  uint64_t read(int32_t w, Cell cell);
  void write(int32_t w, Cell cell, uint64_t value);
  uint64_t load_async(int32_t w, Cell cell);  // read and waited for, as the operands of a product are
  void copy_async(int32_t w, Cell destination, Cell source, bool source_is_private);
  void fence_async_proxy(int32_t w);
  void wait_copies(int32_t w, bool only_read);

  // Start and end of a launch: orders everything, like the boundary of a kernel.
  void signal(int32_t w, Event event);
  void await(int32_t w, Event event, uint64_t value);
  void finish(int32_t w);

  void fail(Verdict verdict, std::string what);

  // --- What the scheduler asks and does.
  size_t num_cells() const { return cells_.size(); }
  size_t num_workers() const { return workers_.size(); }
  int32_t rank_of(int32_t w) const { return workers_[static_cast<size_t>(w)].rank; }
  uint64_t kind_of(int32_t w) const { return workers_[static_cast<size_t>(w)].kind; }
  bool all_finished() const;
  bool is_runnable(int32_t w) const;
  // The running worker first if it can go on, then the other workers, then copies (in the coarsest grain: only when
  // nothing else is left).
  void list_actions(int32_t running, std::vector<Action>& actions) const;
  void list_deadlines(std::vector<Action>& actions) const;
  void do_copy_step(size_t copy_idx);
  void fire_deadline(int32_t w);
  void resume(int32_t w) { workers_[static_cast<size_t>(w)].acted = false; }
  // Equal for states with the same future: memory, copies on their way, and all that each worker has seen.
  uint64_t state_hash() const;
  size_t num_steps() const { return trace_.size(); }
  Verdict verdict() const { return verdict_; }
  const std::string& failure() const { return failure_; }
  std::string trace(size_t last_steps) const;
  std::string blocked_workers() const;
  int32_t flag_kind(const void* address) const { return words_[word(address)].kind; }  // -1: not a flag
  const std::string& cell_name(Cell cell) const { return cell_names_[static_cast<size_t>(cell)]; }

 private:
  enum class Wait : uint8_t { kNone, kWords, kCopiesRead, kCopies, kEvent, kFinished };
  struct Poll {
    size_t word = 0;
    uint64_t value = 0;
    uint64_t history_before = 0;
  };
  struct Worker {
    int32_t rank;
    std::string name;
    uint64_t kind;
    Clock generic{};
    Clock async{};
    uint64_t history = 1;  // hash of all that it has seen and done
    Poll polls[2]{};       // [0] before [1]
    Wait wait = Wait::kNone;
    size_t event = 0;
    uint64_t event_value = 0;
    bool deadline_passed = false;
    bool acted = false;  // since it was scheduled
    uint16_t num_loads = 0;
    uint16_t num_copies = 0;
  };
  struct Word {
    int32_t kind = -1;
    uint64_t value = 0;
    Clock released{};
    uint64_t released_hash = 0;
    int32_t released_rank = 0;
    Scope released_scope = Scope::kSystem;
    Epoch cleared{};
    Clock accesses{};  // atomic ones
  };
  struct Datum {
    bool touched = false;  // in this execution
    uint64_t value = 0;
    uint64_t writer_hash = 0;
    Epoch write{};
    Clock reads{};
  };
  struct Completion {
    uint64_t value = 0;
    Clock clock{};
    uint64_t clock_hash = 0;
  };
  struct Copy {
    int32_t worker;
    Cell destination;
    Cell source;
    bool source_is_private;
    bool source_read;
    Clock start;
    uint16_t time;
    uint64_t value;
    uint64_t hash;
  };
  enum class Op : uint8_t {
    kPoll,
    kAcquire,
    kRelease,
    kAdd,
    kClaim,
    kClear,
    kPause,
    kRead,
    kWrite,
    kLoad,
    kCopy,
    kCopyRead,
    kCopyLand,
    kFence,
    kWaitCopies,
    kWaitCopiesRead,
    kSignal,
    kAwait,
    kDeadline
  };
  struct Step {
    Op op;
    int32_t worker;
    int32_t object;
    uint64_t value;
  };

  size_t word(const void* address) const;
  Datum& datum(Cell cell);
  void set_word(size_t idx, uint64_t value, uint64_t released_hash);
  void set_datum(Cell cell, uint64_t value, uint64_t writer_hash, Epoch write);
  Worker& worker(int32_t w) { return workers_[static_cast<size_t>(w)]; }
  const Worker& worker(int32_t w) const { return workers_[static_cast<size_t>(w)]; }

  void point(int32_t w, bool is_point);
  void block(int32_t w, Wait wait);
  void note(int32_t w, Op op, int32_t object, uint64_t value, uint64_t seen = 0);
  void touch(int32_t w, size_t word_idx);
  void check_read(int32_t w, Cell cell, const Clock& clock, const char* what);
  void check_write(int32_t w, Cell cell, const Clock& clock, const char* what);
  void fail_race(int32_t w, const std::string& object, const char* what, size_t other_component, const char* other);
  void finish_copies(int32_t w, bool only_read);
  bool has_copies(int32_t w, bool only_unread) const;
  Epoch now(int32_t w) const {
    const size_t own = component(static_cast<size_t>(w), kGeneric);
    return {own, worker(w).generic.at[own]};
  }

  Scheduler& scheduler_;
  std::vector<Worker> workers_;
  std::vector<Word> words_;
  std::unordered_map<const void*, int32_t> word_at_;
  std::vector<Datum> cells_;
  std::vector<Completion> events_;
  std::vector<std::string> word_names_;
  std::vector<std::string> cell_names_;
  std::vector<std::string> event_names_;
  std::vector<Cell> touched_;
  uint64_t memory_hash_ = 0;  // of all words and cells
  std::vector<Copy> copies_;
  std::vector<Step> trace_;
  Verdict verdict_ = Verdict::kPass;
  std::string failure_;
};

}  // namespace weft::explore
