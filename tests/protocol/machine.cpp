#include "protocol/machine.hpp"

#include <algorithm>
#include <sstream>

namespace weft::explore {

void Machine::reset() {
  for (size_t w = 0; w < workers_.size(); ++w) {
    Worker& worker = workers_[w];
    worker = Worker{worker.rank, std::move(worker.name), worker.kind};
    worker.generic.at[component(w, kGeneric)] = 1;
  }
  for (Word& word : words_) word = Word{word.kind};
  for (const Cell cell : touched_) cells_[static_cast<size_t>(cell)] = Datum{};
  for (Completion& event : events_) event = Completion{};
  touched_.clear();
  memory_hash_ = 0;
  copies_.clear();
  trace_.clear();
  verdict_ = Verdict::kPass;
}

size_t Machine::word(const void* address) const { return static_cast<size_t>(word_at_.at(address)); }

// Lets others run before the next step of `w`, unless it has only just been scheduled.
void Machine::point(int32_t w, bool is_point) {
  if (worker(w).acted && (is_point || grain == Grain::kEveryAccess)) scheduler_.reschedule();
}

void Machine::block(int32_t w, Wait wait) {
  worker(w).wait = wait;
  if (!is_runnable(w) || grain == Grain::kEveryAccess) scheduler_.reschedule();
  worker(w).wait = Wait::kNone;
}

void Machine::note(int32_t w, Op op, int32_t object, uint64_t value, uint64_t seen) {
  Worker& self = worker(w);
  self.acted = true;
  self.history =
      mix(mix(self.history, static_cast<uint64_t>(op) << 32 | static_cast<uint32_t>(object)), mix(value, seen));
  trace_.push_back({op, w, object, value});
}

Machine::Datum& Machine::datum(Cell cell) {
  Datum& datum = cells_.at(static_cast<size_t>(cell));
  if (!datum.touched) touched_.push_back(cell);
  datum.touched = true;
  return datum;
}

void Machine::set_word(size_t idx, uint64_t value, uint64_t released_hash) {
  Word& flag = words_[idx];
  memory_hash_ -= mix(idx, mix(flag.value, flag.released_hash));
  flag.value = value;
  flag.released_hash = released_hash;
  memory_hash_ += mix(idx, mix(flag.value, flag.released_hash));
}

void Machine::set_datum(Cell idx, uint64_t value, uint64_t writer_hash, Epoch write) {
  constexpr uint64_t kCells = uint64_t{1} << 32;  // apart from the words
  Datum& cell = datum(idx);
  memory_hash_ -= mix(kCells + static_cast<uint64_t>(idx), mix(cell.value, cell.writer_hash));
  cell.value = value;
  cell.writer_hash = writer_hash;
  cell.write = write;
  cell.reads = Clock{};
  memory_hash_ += mix(kCells + static_cast<uint64_t>(idx), mix(cell.value, cell.writer_hash));
}

// An atomic access: ordered against plain clearing only.
void Machine::touch(int32_t w, size_t word_idx) {
  Word& flag = words_[word_idx];
  if (!flag.cleared.before(worker(w).generic)) {
    fail_race(w, word_names_[word_idx], "accesses it", flag.cleared.component, "the clearing");
  }
  const Epoch epoch = now(w);
  flag.accesses.at[epoch.component] = epoch.time;
}

uint64_t Machine::poll(int32_t w, const void* address) {
  const size_t idx = word(address);
  Word& flag = words_[idx];
  point(w, flag.kind >= 0 || abort_words_are_points);
  touch(w, idx);
  Worker& self = worker(w);
  self.polls[0] = self.polls[1];
  self.polls[1] = {idx, flag.value, self.history};
  note(w, Op::kPoll, static_cast<int32_t>(idx), flag.value);
  return flag.value;
}

uint64_t Machine::acquire(int32_t w, const void* address, Scope scope, bool relaxed) {
  point(w, false);  // right behind the poll: later it could only see more
  const size_t idx = word(address);
  Word& flag = words_[idx];
  touch(w, idx);
  Worker& self = worker(w);
  const bool in_scope =
      flag.released_rank == self.rank || (flag.released_scope == Scope::kSystem && scope == Scope::kSystem);
  const bool joins = in_scope && !relaxed;
  if (joins) self.generic.join(flag.released);
  note(w, Op::kAcquire, static_cast<int32_t>(idx), flag.value, joins ? flag.released_hash : 0);
  return flag.value;
}

void Machine::release(int32_t w, const void* address, uint64_t value, Scope scope, bool relaxed) {
  point(w, true);
  const size_t idx = word(address);
  Word& flag = words_[idx];
  touch(w, idx);
  Worker& self = worker(w);
  note(w, Op::kRelease, static_cast<int32_t>(idx), value);
  set_word(idx, value, relaxed ? 0 : self.history);
  flag.released = relaxed ? Clock{} : self.generic;
  flag.released_rank = self.rank;
  flag.released_scope = scope;
  ++self.generic.at[component(static_cast<size_t>(w), kGeneric)];
}

void Machine::release_add(int32_t w, const void* address, uint64_t value, Scope scope, bool relaxed) {
  point(w, true);
  const size_t idx = word(address);
  Word& flag = words_[idx];
  touch(w, idx);
  Worker& self = worker(w);
  note(w, Op::kAdd, static_cast<int32_t>(idx), value);
  if (!relaxed) flag.released.join(self.generic);
  set_word(idx, flag.value + value, flag.released_hash + (relaxed ? 0 : mix(self.history, 1)));  // additions commute
  flag.released_rank = self.rank;
  flag.released_scope = scope;
  ++self.generic.at[component(static_cast<size_t>(w), kGeneric)];
}

uint64_t Machine::claim(int32_t w, const void* address) {
  point(w, true);
  const size_t idx = word(address);
  Word& flag = words_[idx];
  touch(w, idx);
  const uint64_t ticket = flag.value;
  note(w, Op::kClaim, static_cast<int32_t>(idx), ticket);
  set_word(idx, ticket + 1, flag.released_hash);
  return ticket;
}

void Machine::clear(int32_t w, const void* address) {
  point(w, false);
  const size_t idx = word(address);
  Word& flag = words_[idx];
  const Clock& clock = worker(w).generic;
  if (!flag.cleared.before(clock)) {
    fail_race(w, word_names_[idx], "clears it", flag.cleared.component, "another clearing");
  }
  for (size_t n = 0; n < clock.at.size(); ++n) {
    if (flag.accesses.at[n] > clock.at[n]) fail_race(w, word_names_[idx], "clears it", n, "an access");
  }
  note(w, Op::kClear, static_cast<int32_t>(idx), 0);
  set_word(idx, 0, 0);
  flag.released = Clock{};
  flag.cleared = now(w);
}

// A worker that waits has learnt nothing: its history goes back to before the two polls, so that having waited and
// coming later are the same state.
bool Machine::pause(int32_t w) {
  worker(w).history = worker(w).polls[0].history_before;
  block(w, Wait::kWords);
  return !std::exchange(worker(w).deadline_passed, false);
}

void Machine::check_read(int32_t w, Cell idx, const Clock& clock, const char* what) {
  const Datum& cell = datum(idx);
  if (!cell.write.before(clock)) fail_race(w, cell_name(idx), what, cell.write.component, "the write");
}
void Machine::check_write(int32_t w, Cell idx, const Clock& clock, const char* what) {
  check_read(w, idx, clock, what);
  const Datum& cell = datum(idx);
  for (size_t n = 0; n < clock.at.size(); ++n) {
    if (cell.reads.at[n] > clock.at[n]) fail_race(w, cell_name(idx), what, n, "a read");
  }
}

uint64_t Machine::read(int32_t w, Cell idx) {
  point(w, false);
  Datum& cell = datum(idx);
  check_read(w, idx, worker(w).generic, "reads it");
  const Epoch epoch = now(w);
  cell.reads.at[epoch.component] = epoch.time;
  note(w, Op::kRead, idx, cell.value, cell.writer_hash);
  return cell.value;
}

void Machine::write(int32_t w, Cell idx, uint64_t value) {
  point(w, false);
  check_write(w, idx, worker(w).generic, "writes it");
  note(w, Op::kWrite, idx, value);
  set_datum(idx, value, worker(w).history, now(w));
}

uint64_t Machine::load_async(int32_t w, Cell idx) {
  point(w, false);
  Datum& cell = datum(idx);
  Worker& self = worker(w);
  check_read(w, idx, self.async, "loads it asynchronously");
  const size_t own = component(static_cast<size_t>(w), kLoad);
  cell.reads.at[own] = self.generic.at[own] = ++self.num_loads;
  note(w, Op::kLoad, idx, cell.value, cell.writer_hash);
  return cell.value;
}

void Machine::copy_async(int32_t w, Cell destination, Cell source, bool source_is_private) {
  point(w, false);
  Worker& self = worker(w);
  note(w, Op::kCopy, destination, static_cast<uint64_t>(source));
  copies_.push_back({w, destination, source, source_is_private, false, self.async, ++self.num_copies, 0, self.history});
}

void Machine::do_copy_step(size_t copy_idx) {
  Copy& copy = copies_[copy_idx];
  const auto owner = static_cast<size_t>(copy.worker);
  if (!copy.source_read) {
    Datum& source = datum(copy.source);
    // A body that fills its own staging buffer fences that buffer itself.
    if (!copy.source_is_private) check_read(copy.worker, copy.source, copy.start, "reads it for a copy");
    source.reads.at[component(owner, kCopyRead)] = copy.time;
    copy.value = source.value;
    copy.hash = mix(copy.hash, mix(copy.value, source.writer_hash));
    copy.source_read = true;
    trace_.push_back({Op::kCopyRead, copy.worker, copy.source, copy.value});
    return;
  }
  check_write(copy.worker, copy.destination, copy.start, "lands a copy on it");
  set_datum(copy.destination, copy.value, copy.hash, {component(owner, kCopyWrite), copy.time});
  trace_.push_back({Op::kCopyLand, copy.worker, copy.destination, copy.value});
  copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(copy_idx));
}

void Machine::finish_copies(int32_t w, bool only_read) {
  for (size_t n = 0; n < copies_.size();) {
    if (copies_[n].worker != w || (only_read && copies_[n].source_read)) {
      ++n;
    } else {
      do_copy_step(n);
    }
  }
}

void Machine::fence_async_proxy(int32_t w) {
  point(w, false);
  worker(w).async.join(worker(w).generic);
  note(w, Op::kFence, 0, 0);
}

void Machine::wait_copies(int32_t w, bool only_read) {
  if (grain == Grain::kSynchronisation) finish_copies(w, only_read);
  block(w, only_read ? Wait::kCopiesRead : Wait::kCopies);
  Worker& self = worker(w);
  self.generic.at[component(static_cast<size_t>(w), kCopyRead)] = self.num_copies;
  if (!only_read) self.generic.at[component(static_cast<size_t>(w), kCopyWrite)] = self.num_copies;
  note(w, only_read ? Op::kWaitCopiesRead : Op::kWaitCopies, 0, 0);
}

void Machine::signal(int32_t w, Event idx) {
  point(w, true);
  Worker& self = worker(w);
  Completion& event = events_[static_cast<size_t>(idx)];
  note(w, Op::kSignal, idx, event.value);
  ++event.value;
  event.clock.join(self.generic);
  event.clock_hash += mix(self.history, 1);
  ++self.generic.at[component(static_cast<size_t>(w), kGeneric)];
}

void Machine::await(int32_t w, Event idx, uint64_t value) {
  Worker& self = worker(w);
  self.event = static_cast<size_t>(idx);
  self.event_value = value;
  block(w, Wait::kEvent);
  const Completion& event = events_[static_cast<size_t>(idx)];
  self.generic.join(event.clock);
  self.async.join(self.generic);
  note(w, Op::kAwait, idx, value, event.clock_hash);
}

void Machine::finish(int32_t w) { worker(w).wait = Wait::kFinished; }

bool Machine::all_finished() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.wait == Wait::kFinished; });
}

bool Machine::has_copies(int32_t w, bool only_unread) const {
  return std::any_of(copies_.begin(), copies_.end(),
                     [&](const Copy& copy) { return copy.worker == w && !(only_unread && copy.source_read); });
}

bool Machine::is_runnable(int32_t w) const {
  const Worker& self = worker(w);
  switch (self.wait) {
    case Wait::kNone:
      return true;
    case Wait::kWords:
      return self.deadline_passed || words_[self.polls[0].word].value != self.polls[0].value ||
             words_[self.polls[1].word].value != self.polls[1].value;
    case Wait::kCopiesRead:
      return !has_copies(w, true);
    case Wait::kCopies:
      return !has_copies(w, false);
    case Wait::kEvent:
      return events_[self.event].value >= self.event_value;
    case Wait::kFinished:
      return false;
  }
  return false;
}

void Machine::list_actions(int32_t running, std::vector<Action>& actions) const {
  actions.clear();
  if (is_runnable(running)) actions.push_back({Action::Kind::kWorker, static_cast<uint8_t>(running)});
  for (size_t w = 0; w < workers_.size(); ++w) {
    if (static_cast<int32_t>(w) != running && is_runnable(static_cast<int32_t>(w))) {
      actions.push_back({Action::Kind::kWorker, static_cast<uint8_t>(w)});
    }
  }
  if (grain == Grain::kSynchronisation && !actions.empty()) return;
  for (size_t n = 0; n < copies_.size(); ++n) actions.push_back({Action::Kind::kCopy, static_cast<uint8_t>(n)});
}

void Machine::list_deadlines(std::vector<Action>& actions) const {
  actions.clear();
  for (size_t w = 0; w < workers_.size(); ++w) {
    if (workers_[w].wait == Wait::kWords) actions.push_back({Action::Kind::kDeadline, static_cast<uint8_t>(w)});
  }
}

void Machine::fire_deadline(int32_t w) {
  worker(w).deadline_passed = true;
  note(w, Op::kDeadline, static_cast<int32_t>(worker(w).polls[0].word), 0);
}

uint64_t Machine::state_hash() const {
  uint64_t hash = memory_hash_;
  for (const Worker& self : workers_) hash += mix(self.kind, mix(self.history, self.wait == Wait::kFinished));
  for (const Copy& copy : copies_) hash += mix(copy.hash, copy.source_read ? 2 : 3);
  return hash;
}

void Machine::fail(Verdict verdict, std::string what) {
  verdict_ = verdict;
  failure_ = std::move(what);
  scheduler_.stop();
}

void Machine::fail_race(int32_t w, const std::string& object, const char* what, size_t other_component,
                        const char* other) {
  if (!finds_races) return;
  fail(Verdict::kRace, words("race on ", object, ": ", worker(w).name, " ", what, ", and nothing orders that behind ",
                             other, " by ", workers_[other_component / kNumParts].name));
}

std::string Machine::trace(size_t last_steps) const {
  constexpr const char* kNames[] = {"poll",
                                    "acquire",
                                    "release",
                                    "add",
                                    "claim",
                                    "clear",
                                    "pause",
                                    "read",
                                    "write",
                                    "load",
                                    "copy to",
                                    "copy has read",
                                    "copy has landed on",
                                    "proxy fence",
                                    "wait for copies",
                                    "wait for reads of copies",
                                    "signal",
                                    "await",
                                    "deadline at"};
  std::ostringstream out;
  for (size_t n = trace_.size() - std::min(trace_.size(), last_steps); n < trace_.size(); ++n) {
    const Step& step = trace_[n];
    const auto object = static_cast<size_t>(step.object);
    out << "  " << n << "  " << worker(step.worker).name << ": " << kNames[static_cast<size_t>(step.op)];
    if (step.op <= Op::kClear || step.op == Op::kDeadline) {
      out << " " << word_names_[object] << " (" << step.value << ")";
    } else if (step.op <= Op::kCopyLand) {
      out << " " << cell_names_[object];
    } else if (step.op == Op::kSignal || step.op == Op::kAwait) {
      out << " " << event_names_[object];
    }
    out << "\n";
  }
  return out.str();
}

std::string Machine::blocked_workers() const {
  std::ostringstream out;
  for (const Worker& self : workers_) {
    if (self.wait == Wait::kFinished) continue;
    out << "  " << self.name << " waits for ";
    if (self.wait == Wait::kWords) {
      out << word_names_[self.polls[0].word] << ", which is " << words_[self.polls[0].word].value << "\n";
    } else if (self.wait == Wait::kEvent) {
      out << event_names_[self.event] << "\n";
    } else {
      out << "its turn\n";
    }
  }
  return out.str();
}

}  // namespace weft::explore
