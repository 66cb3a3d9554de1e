// ToyLayer: the ranks of a group making layer calls on a model machine. Roles, gates, barrier, plan and task order are
// the real ones; the results are compared with a serial run of the same bodies.
//
// The leader of a rank does what the caller and the launch do on a machine: stage inputs, meet the other ranks, build
// the plan, clear the flags, start the workers, and check the results when all have finished.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/planned.hpp"
#include "core/status.hpp"
#include "protocol/explorer.hpp"
#include "protocol/model_memory.hpp"
#include "protocol/toy_bodies.hpp"
#include "reference/roles.hpp"

namespace weft::explore {

struct ToyCall {
  Direction direction;
  Work work;
};

struct ToyCase {
  std::vector<cases::Routing> routings;  // of the launches; all of the same sizes
  std::vector<ToyCall> calls;            // likewise
  int32_t comm_workers = 1;
  int32_t matrix_workers = 1;  // 0: the phased path, one worker a rank
  bool copies_rows = false;    // pulls and combines move rows by asynchronous copies, not by loads and stores
  int32_t hidden = kTileCols;
  int32_t intermediate = kTileCols;
  bool epochs_advance = true;
  int32_t absent_rank = -1;          // never arrives
  int32_t rank_without_matrix = -1;  // its matrix workers never start
};

// Plain memory without time, for the serial run that says what the results must be.
class SerialMemory {
 public:
  explicit SerialMemory(std::vector<uint64_t>& cells) : cells_(cells) {}
  uint64_t read(Machine::Cell cell) { return cells_[static_cast<size_t>(cell)]; }
  uint64_t load(Machine::Cell cell) { return read(cell); }
  void write(Machine::Cell cell, uint64_t value) { cells_[static_cast<size_t>(cell)] = value; }
  void store(Machine::Cell cell, uint64_t value) { write(cell, value); }
  void copy(Machine::Cell destination, Machine::Cell source) { write(destination, read(source)); }

 private:
  std::vector<uint64_t>& cells_;
};

template <class Memory>
class ToyLayer {
 public:
  // Makes the memory policy of a worker for one launch, whose first epoch is given.
  using MakeMemory = std::function<Memory(const ModelMemory&, uint32_t epoch)>;

  ToyLayer(const ToyCase& toy, MakeMemory make_memory) : toy_(toy), make_memory_(std::move(make_memory)) {
    uint32_t epoch = 1;
    for (size_t n = 0; n < toy_.routings.size(); ++n) {
      plans_.push_back(cases::plans_of(toy_.routings[n], toy_.hidden, toy_.intermediate));
      epochs_.push_back(epoch);
      if (toy_.epochs_advance) epoch += static_cast<uint32_t>(*plans_[n][0]->num_passes);
    }
    for (int32_t rank = 0; rank < num_ranks(); ++rank) add_rank(rank);
    for (int32_t rank = 0; rank < num_ranks(); ++rank) name_flags(rank);
    run_serially();
  }

  Machine& machine() { return explorer_.machine(); }

  Outcome explore(const Limits& limits) {
    machine().abort_words_are_points = limits.deadlines;
    return explorer_.explore(
        limits, [this] { reset(); }, [this](int32_t w) { run_worker(w); }, [this] { return check_(*this); });
  }

  // By worker: the report of one that stalled.
  const std::vector<StallReport>& reports() const { return reports_; }
  int32_t rank_of(size_t worker) const { return workers_[worker].rank; }
  void set_check(std::function<std::string(const ToyLayer&)> check) { check_ = std::move(check); }

 private:
  enum class Role { kLeader, kComm, kMatrix };
  struct WorkerId {
    int32_t rank;
    Role role;
    Machine::Cell staging;
  };
  struct Rank {
    std::vector<std::byte> flag_words;
    LocalFlags flags;
    std::vector<uint32_t> arrived;
    Machine::Event started;
    Machine::Event finished;
    bool stopped = false;  // the leader gave up: no launch follows
  };

  int32_t num_ranks() const { return toy_.routings[0].ep_size(); }
  int32_t num_launches() const { return static_cast<int32_t>(toy_.routings.size()); }
  int32_t workers_a_rank() const { return toy_.comm_workers + toy_.matrix_workers; }
  const Plan& plan(int32_t launch, int32_t rank) const {
    return *plans_[static_cast<size_t>(launch)][static_cast<size_t>(rank)];
  }
  const LayerShape& shape() const { return plans_[0][0]->shape; }
  int64_t tokens_of(int32_t launch, int32_t rank) const {
    return toy_.routings[static_cast<size_t>(launch)].num_tokens[static_cast<size_t>(rank)];
  }

  void add_rank(int32_t rank) {
    const auto add_worker = [&](Role role, const char* name) {
      machine().add_worker(rank, name);
      const Machine::Cell staging =
          machine().add_cells("staging buffer of a worker of rank " + std::to_string(rank), 1);
      workers_.push_back({rank, role, staging});
    };
    add_worker(Role::kLeader, "leader");  // the first comm worker
    for (int32_t n = 1; n < toy_.comm_workers; ++n) add_worker(Role::kComm, "comm");
    for (int32_t n = 0; n < toy_.matrix_workers; ++n) add_worker(Role::kMatrix, "matrix");

    const auto cells = [&](const char* name, int64_t count) {
      return machine().add_cells("rank " + std::to_string(rank) + " " + name, static_cast<int32_t>(count));
    };
    const auto max_tokens = shape().max_tokens;
    const int64_t tiles = ceil_div(std::max(toy_.hidden, toy_.intermediate), kTileCols);
    const int64_t wgrad_tiles = ToyBodies::max_wgrad_tiles(shape());
    cells_.push_back({cells("indices", 1), cells("x", max_tokens), cells("dy", max_tokens),
                      cells("partial", max_tokens * shape().slots_per_token()), cells("y", max_tokens),
                      cells("plan", 1), cells("pool_x", shape().capacity_rows()),
                      cells("pool_dy", shape().capacity_rows()), cells("mid", shape().capacity_blocks * tiles),
                      cells("out", shape().capacity_blocks * tiles),
                      cells("wgrad", 2 * shape().num_local_experts() * wgrad_tiles * wgrad_tiles)});
    Rank state{};
    state.started = machine().add_event("the start of a launch of rank " + std::to_string(rank));
    state.finished = machine().add_event("the end of the workers of rank " + std::to_string(rank));
    ranks_.push_back(std::move(state));
    controls_.push_back(std::make_unique<ControlBlock>());
  }

  // Flags are memory whose addresses name them; their values live in the machine.
  void name_flags(int32_t rank) {
    Rank& self = ranks_[static_cast<size_t>(rank)];
    ControlBlock& control = *controls_[static_cast<size_t>(rank)];
    control_of_[rank] = &control;
    for (int32_t peer = 0; peer < num_ranks(); ++peer) {
      for (int32_t bank = 0; bank < kNumBanks; ++bank) {
        machine().add_flag(&control.entry[bank][peer], words("entry[", bank, "][", peer, "]"), rank, FlagKind::kEntry);
      }
      machine().add_flag(&control.pulls_done[peer], words("pulls_done[", peer, "]"), rank, FlagKind::kPullsDone);
    }
    machine().add_word(&control.abort, words("abort of rank ", rank));
    self.arrived.resize(static_cast<size_t>(shape().max_tokens * shape().slots_per_token()));
    arrived_of_[rank] = {self.arrived.data()};
    for (size_t slot = 0; slot < self.arrived.size(); ++slot) {
      machine().add_flag(&self.arrived[slot], words("arrived[", slot, "]"), rank, FlagKind::kArrived);
    }

    Carver measure;
    carve_local_flags(measure, shape());
    self.flag_words.resize(static_cast<size_t>(measure.used()));
    Carver carver(self.flag_words.data());
    self.flags = carve_local_flags(carver, shape());
    for (int32_t bank = 0; bank < kNumBanks; ++bank) {
      const PassFlags& flags = self.flags.of_pass(bank);
      const auto add = [&](const uint32_t* word, const char* name, FlagKind kind, int32_t idx = -1) {
        const std::string index = idx < 0 ? "" : words("[", idx, "]");
        machine().add_flag(word, words(name, index, " of bank ", bank), rank, kind);
      };
      machine().add_word(flags.matrix_ticket, words("matrix ticket of bank ", bank, " of rank ", rank));
      machine().add_word(flags.comm_ticket, words("comm ticket of bank ", bank, " of rank ", rank));
      add(flags.pulled, "pulled", FlagKind::kPulled);
      add(flags.workers_done, "workers_done", FlagKind::kWorkersDone);
      for (int32_t block = 0; block < shape().capacity_blocks; ++block) {
        add(&flags.rows_ready[block], "rows_ready", FlagKind::kRowsReady, block);
        add(&flags.z_ready[block], "z_ready", FlagKind::kZReady, block);
        add(&flags.mid_ready[block], "mid_ready", FlagKind::kMidReady, block);
      }
      for (int32_t flag = 0; flag < kMaxParts * shape().capacity_blocks; ++flag) {
        add(&flags.out_ready[flag], "out_ready", FlagKind::kOutReady, flag);
      }
    }
    machine().add_flag(self.flags.pass_open, "pass_open", rank, FlagKind::kPassOpen);
  }

  void reset() {
    for (Rank& rank : ranks_) rank.stopped = false;
    reports_.assign(workers_.size(), StallReport{});
  }

  Launch launch_of(int32_t launch, int32_t rank) const {
    const cases::Routing& routing = toy_.routings[static_cast<size_t>(launch)];
    const ToyCall& call = toy_.calls[static_cast<size_t>(launch)];
    return {plan(launch, rank),
            call.direction,
            call.work,
            static_cast<int32_t>(tokens_of(launch, rank)),
            routing.topk_idx[static_cast<size_t>(rank)].data(),
            epochs_[static_cast<size_t>(launch)],
            workers_a_rank(),
            ranks_[static_cast<size_t>(rank)].flags,
            control_of_,
            arrived_of_};
  }
  ToyBodies bodies_of(const Launch& launch) const {
    return {cells_, launch.rank(), launch.topk_idx, launch.direction, toy_.copies_rows};
  }

  template <class AnyMemory>
  void stage(int32_t launch, int32_t rank, AnyMemory& memory) const {
    const RankCells& cells = cells_[static_cast<size_t>(rank)];
    const uint64_t call = mix(static_cast<uint64_t>(launch) + 1, static_cast<uint64_t>(rank));
    memory.write(cells.meta, call);
    for (int32_t token = 0; token < tokens_of(launch, rank); ++token) {
      memory.write(cells.x + token, mix(call, static_cast<uint64_t>(2 * token)));
      memory.write(cells.dy + token, mix(call, static_cast<uint64_t>(2 * token + 1)));
    }
  }

  // --- The life of a worker.
  void run_worker(int32_t w) {
    const WorkerId& self = workers_[static_cast<size_t>(w)];
    if (self.rank == toy_.absent_rank) return;
    if (self.rank == toy_.rank_without_matrix && self.role == Role::kMatrix) return;
    Rank& rank = ranks_[static_cast<size_t>(self.rank)];
    for (int32_t n = 0; n < num_launches(); ++n) {
      const Launch launch = launch_of(n, self.rank);
      Memory memory = make_memory_(ModelMemory(machine(), w, self.staging), launch.epoch);
      if (self.role == Role::kLeader && !begin_launch(w, n, launch, memory)) return;
      machine().await(w, rank.started, static_cast<uint64_t>(n) + 1);
      if (rank.stopped) return;
      ToyBodies bodies = bodies_of(launch);
      Worker<Memory, ToyBodies> worker(launch, memory, bodies);
      const bool done = toy_.matrix_workers == 0 ? worker.run_phased()
                                                 : worker.run(self.role != Role::kMatrix, self.role == Role::kLeader);
      if (!done) {
        reports_[static_cast<size_t>(w)] = worker.report();
        if (self.role == Role::kLeader) stop_rank(w);
        return;
      }
      machine().signal(w, rank.finished);
      if (self.role == Role::kLeader) end_launch(w, n, memory);
    }
  }

  bool begin_launch(int32_t w, int32_t n, const Launch& launch, Memory& memory) {
    const int32_t rank = launch.rank();
    const CallKind kind = launch.direction == Direction::kForward ? CallKind::kForward : CallKind::kBackward;
    stage(n, rank, memory);
    Call calls[kMaxRanks];
    Gate<Memory> gate(memory, control_of_, rank, num_ranks());
    arrive(memory, control_of_, rank, num_ranks(), launch.epoch, {kind, static_cast<uint32_t>(n)});
    if (!await_all(memory, gate, control_of_, rank, num_ranks(), launch.epoch, WaitTask::kForward, calls)) {
      reports_[static_cast<size_t>(w)] = gate.report();
      stop_rank(w);
      return false;
    }
    for (int32_t peer = 0; peer < num_ranks(); ++peer) {
      if (calls[peer].kind != kind || calls[peer].fingerprint != static_cast<uint32_t>(n)) {
        machine().fail(Verdict::kWrongValue, "a rank meets another one that has come to another call");
      }
      memory.read(cells_[static_cast<size_t>(peer)].meta);
    }
    memory.write(cells_[static_cast<size_t>(rank)].plan, static_cast<uint64_t>(n));
    memory.clear(launch.flags.words, kNumBanks * launch.flags.words_per_bank + 1);
    machine().signal(w, ranks_[static_cast<size_t>(rank)].started);
    return true;
  }

  void end_launch(int32_t w, int32_t n, Memory& memory) {
    const int32_t rank = workers_[static_cast<size_t>(w)].rank;
    machine().await(w, ranks_[static_cast<size_t>(rank)].finished, static_cast<uint64_t>((n + 1) * workers_a_rank()));
    for (const auto& [cell, value] : expected_[static_cast<size_t>(n)][static_cast<size_t>(rank)]) {
      if (memory.read(cell) != value) {
        machine().fail(Verdict::kWrongValue, words("after launch ", n, ", ", machine().cell_name(cell),
                                                   " is not what its routes, launch and passes make"));
      }
    }
  }

  void stop_rank(int32_t w) {
    Rank& rank = ranks_[static_cast<size_t>(workers_[static_cast<size_t>(w)].rank)];
    rank.stopped = true;
    for (int32_t n = 0; n < num_launches(); ++n) machine().signal(w, rank.started);
  }

  // --- What the results must be.
  void run_serially() {
    std::vector<uint64_t> values(machine().num_cells(), 0);
    SerialMemory memory(values);
    for (int32_t n = 0; n < num_launches(); ++n) {
      std::vector<std::vector<std::pair<Machine::Cell, uint64_t>>> results(static_cast<size_t>(num_ranks()));
      for (int32_t rank = 0; rank < num_ranks(); ++rank) stage(n, rank, memory);
      for (int32_t pass = 0; pass < *plan(n, 0).num_passes; ++pass) {
        run_pass_serially(n, pass, memory, results);
      }
      const bool sums = toy_.calls[static_cast<size_t>(n)].work.combine;
      for (int32_t rank = 0; rank < num_ranks(); ++rank) {
        auto& of_rank = results[static_cast<size_t>(rank)];
        const Machine::Cell y = cells_[static_cast<size_t>(rank)].y;
        for (int32_t token = 0; sums && token < tokens_of(n, rank); ++token) of_rank.emplace_back(y + token, 0);
        for (auto& [cell, value] : of_rank) value = memory.read(cell);
      }
      expected_.push_back(std::move(results));
    }
  }

  void run_pass_serially(int32_t n, int32_t pass, SerialMemory& memory,
                         std::vector<std::vector<std::pair<Machine::Cell, uint64_t>>>& results) {
    for (const CommTaskKind kind : {CommTaskKind::kPull, CommTaskKind::kCombine, CommTaskKind::kSumTokens}) {
      for (int32_t rank = 0; rank < num_ranks(); ++rank) {
        const Launch launch = launch_of(n, rank);
        const TaskOrder order(launch.plan, launch.direction, pass, launch.num_own_tokens, launch.work);
        ToyBodies bodies = bodies_of(launch);
        for (int32_t ticket = 0; ticket < order.comm().num_tasks(); ++ticket) {
          const CommTask task = order.comm().task(ticket);
          for (int32_t item = task.begin; task.kind == kind && item < task.end; ++item) {
            if (kind == CommTaskKind::kPull) bodies.pull(order, item, memory);
            if (kind == CommTaskKind::kCombine) bodies.combine(order, launch.plan.combine_order[item], memory);
            if (kind == CommTaskKind::kSumTokens) bodies.sum_token(order, item, memory);
          }
        }
        if (kind != CommTaskKind::kPull) continue;
        for (int32_t ticket = 0; ticket < order.num_matrix_tasks(); ++ticket) {
          const MatrixTask task = order.matrix_task(ticket);
          bodies.matrix(order, task, memory);
          if (!is_wgrad(task.kind) || order.continues_in_later_pass(task.local_expert)) continue;
          const RankCells& cells = cells_[static_cast<size_t>(rank)];
          results[static_cast<size_t>(rank)].emplace_back(ToyBodies::wgrad_cell(cells, order, task), 0);
        }
      }
    }
  }

  ToyCase toy_;
  MakeMemory make_memory_;
  Explorer explorer_;
  std::vector<std::vector<cases::RankPlan>> plans_;  // [launch][rank]
  std::vector<uint32_t> epochs_;
  std::vector<WorkerId> workers_;
  std::vector<RankCells> cells_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<ControlBlock>> controls_;
  ControlBlock* control_of_[kMaxRanks] = {};
  SymmetricFlags arrived_of_[kMaxRanks] = {};
  std::vector<std::vector<std::vector<std::pair<Machine::Cell, uint64_t>>>> expected_;  // [launch][rank]
  std::vector<StallReport> reports_;
  std::function<std::string(const ToyLayer&)> check_ = [](const ToyLayer&) { return std::string(); };
};

}  // namespace weft::explore
