// Roles: what the workers of a rank do in a pass - claim a ticket, wait at the gates, run the task body, raise the
// flag. This is the protocol in motion, written once over a memory policy (protocol/memory_policy.hpp) and a set of
// task bodies: overlapped.cpp runs it on threads with real data, tests/protocol explores it. It must not know what a
// task computes.
//
//   role    tickets         waits for                                   raises
//   comm    pull            (the entry barrier has passed)              rows_ready[block] += rows, pulled += 1
//           pulls_done      pulled == pull tasks                        pulls_done of every peer
//           combine         out_ready (no dgrad: mid_ready) of its rows arrived[slot] on the owner
//           sum tokens      arrived of every rank with a row            (y, dx are complete)
//           drain           pulls_done of every peer                    (staging may be written again)
//   matrix  gate_up         rows_ready[block] == its rows               mid_ready[block] += 1
//           down            mid_ready[block] == gate_up tiles           out_ready[block] += 1
//           down_dgrad      rows_ready[block] == its rows               mid_ready[block] += 1
//           gate_up_dgrad   mid_ready[block] == down_dgrad tiles        out_ready[block] += 1
//           wgrads          mid_ready of all blocks of the expert       (the gradient tile is complete)
//   leader  one worker of the rank: meets the other ranks between passes, clears the bank of the next pass
#pragma once

#include <cstdint>

#include "protocol/gate.hpp"
#include "protocol/rank_barrier.hpp"
#include "schedule/phases.hpp"
#include "schedule/routing.hpp"
#include "schedule/task_order.hpp"

namespace weft {

constexpr WaitTask wait_task(TaskKind kind) {
  switch (kind) {
    case TaskKind::kGateUp:
      return WaitTask::kGateUp;
    case TaskKind::kDown:
      return WaitTask::kDown;
    case TaskKind::kDownDgrad:
      return WaitTask::kDownDgrad;
    case TaskKind::kGateUpDgrad:
      return WaitTask::kGateUpDgrad;
    case TaskKind::kDownWgrad:
      return WaitTask::kDownWgrad;
    case TaskKind::kGateUpWgrad:
      break;
  }
  return WaitTask::kGateUpWgrad;
}

constexpr WaitTask wait_task(CommTaskKind kind) {
  switch (kind) {
    case CommTaskKind::kPull:
      return WaitTask::kDispatch;
    case CommTaskKind::kPullsDone:
      return WaitTask::kPullsDone;
    case CommTaskKind::kCombine:
      return WaitTask::kCombine;
    case CommTaskKind::kSumTokens:
      return WaitTask::kSumTokens;
    case CommTaskKind::kDrain:
      break;
  }
  return WaitTask::kDrain;
}

// One launch as every worker of a rank sees it.
struct Launch {
  Plan plan;
  Direction direction;
  Work work;
  int32_t num_own_tokens;
  const int32_t* topk_idx;  // this rank's own [T, K]
  uint32_t epoch;           // of pass 0; pass p runs in epoch + p
  int32_t num_workers;      // comm and matrix workers together; worker 0 leads
  LocalFlags flags;
  ControlBlock* const* controls;  // of all ranks
  const SymmetricFlags* peers;    // of all ranks

  int32_t rank() const { return plan.shape.ep_rank; }
  int32_t num_ranks() const { return plan.shape.ep_size; }
  uint32_t epoch_of(int32_t pass) const { return epoch + static_cast<uint32_t>(pass); }
};

// Bodies provides, with Memory& as its last argument:
//   pull(order, row)         combine(order, entry_idx)   sum_token(order, token)   matrix(order, MatrixTask)
// Every body but sum_token may copy asynchronously: the roles fence the proxy before it, behind the gates, and wait for
// the copies before they raise the flag.
template <class Memory, class Bodies>
class Worker {
 public:
  Worker(const Launch& launch, Memory& memory, Bodies& bodies)
      : launch_(launch),
        memory_(memory),
        bodies_(bodies),
        gate_(memory, launch.controls, launch.rank(), launch.num_ranks()) {}

  const StallReport& report() const { return gate_.report(); }

  // The passes of a launch, in the role of a comm or a matrix worker. False after a stall.
  bool run(bool is_comm, bool is_leader) {
    const int32_t num_passes = *launch_.plan.num_passes;
    for (int32_t pass = 0; pass < num_passes; ++pass) {
      if (!enter_pass(pass, is_leader)) return false;
      const TaskOrder order(launch_.plan, launch_.direction, pass, launch_.num_own_tokens, launch_.work);
      if (!(is_comm ? run_comm(order) : run_matrix(order))) return false;
      if (!leave_pass(pass, is_leader)) return false;
    }
    return true;
  }

  // The debug path: the same tasks in one thread, stage by stage, so that every gate is already open.
  bool run_phased() {
    const int32_t num_passes = *launch_.plan.num_passes;
    for (int32_t pass = 0; pass < num_passes; ++pass) {
      if (!enter_pass(pass, true)) return false;
      const TaskOrder order(launch_.plan, launch_.direction, pass, launch_.num_own_tokens, launch_.work);
      for (const PhaseMask phase : phases_of(launch_.direction)) {
        if (!run_comm_phase(order, phase) || !run_matrix_phase(order, phase)) return false;
      }
      if (!leave_pass(pass, true)) return false;
    }
    return true;
  }

  // One role of one pass, until its tickets run out.
  bool run_comm(const TaskOrder& order) {
    for (;;) {
      const auto ticket = static_cast<int32_t>(memory_.claim(flags(order).comm_ticket));
      if (ticket >= order.comm().num_tasks()) return true;
      if (!run_comm_task(order, order.comm().task(ticket), ticket)) return false;
    }
  }
  bool run_matrix(const TaskOrder& order) {
    const int32_t num_tasks = order.num_matrix_tasks();
    for (;;) {
      const auto ticket = static_cast<int32_t>(memory_.claim(flags(order).matrix_ticket));
      if (ticket >= num_tasks) return true;
      if (!run_matrix_task(order, order.matrix_task(ticket), ticket)) return false;
    }
  }

 private:
  bool run_comm_phase(const TaskOrder& order, PhaseMask phase) {
    const TicketRange tickets = comm_tickets(order.comm(), phase);
    for (int32_t ticket = tickets.begin; ticket < tickets.end; ++ticket) {
      if (!run_comm_task(order, order.comm().task(ticket), ticket)) return false;
    }
    return true;
  }
  bool run_matrix_phase(const TaskOrder& order, PhaseMask phase) {
    const int32_t num_tasks = order.num_matrix_tasks();
    for (int32_t ticket = 0; ticket < num_tasks; ++ticket) {
      const MatrixTask task = order.matrix_task(ticket);
      if (matrix_phase(task.kind) == phase && !run_matrix_task(order, task, ticket)) return false;
    }
    return true;
  }

  const PassFlags& flags(const TaskOrder& order) const { return launch_.flags.of_pass(order.pass()); }

  // The leader opens pass p > 0 when all ranks have left pass p - 1: their partial rows have been summed, so the slots
  // may be written again. No worker of this rank is in a pass then, so the bank of pass p + 1 may be cleared.
  bool enter_pass(int32_t pass, bool is_leader) {
    const auto opened = static_cast<uint32_t>(pass + 1);
    if (!is_leader) {
      const WaitSite site{WaitTask::kEnterPass, pass, FlagKind::kPassOpen, -1, -1};
      return gate_.wait(launch_.flags.pass_open, opened, Scope::kRank, site);
    }
    if (pass > 0) {
      Call calls[kMaxRanks];
      arrive(memory_, launch_.controls, launch_.rank(), launch_.num_ranks(), launch_.epoch_of(pass),
             {CallKind::kNextPass, 0});
      if (!await_all(memory_, gate_, launch_.controls, launch_.rank(), launch_.num_ranks(), launch_.epoch_of(pass),
                     WaitTask::kEnterPass, calls)) {
        return false;
      }
    }
    memory_.clear(launch_.flags.bank_words(pass + 1), launch_.flags.words_per_bank);
    memory_.release(launch_.flags.pass_open, opened, Scope::kRank);
    return true;
  }

  bool leave_pass(int32_t pass, bool is_leader) {
    const PassFlags& bank = launch_.flags.of_pass(pass);
    memory_.wait_copies();  // of weight gradients, which have no flag: the next pass or the caller goes on with them
    memory_.release_add(bank.workers_done, 1, Scope::kRank);
    if (!is_leader) return true;
    const WaitSite site{WaitTask::kLeavePass, pass, FlagKind::kWorkersDone, -1, -1};
    return gate_.wait(bank.workers_done, static_cast<uint32_t>(launch_.num_workers), Scope::kRank, site);
  }

  bool run_comm_task(const TaskOrder& order, const CommTask& task, int32_t ticket) {
    switch (task.kind) {
      case CommTaskKind::kPull:
        return pull(order, task);
      case CommTaskKind::kPullsDone:
        return announce_pulls_done(order, ticket);
      case CommTaskKind::kCombine:
        return combine(order, task, ticket);
      case CommTaskKind::kSumTokens:
        return sum_tokens(order, task, ticket);
      case CommTaskKind::kDrain:
        return drain(order, ticket);
    }
    return false;
  }

  bool pull(const TaskOrder& order, const CommTask& task) {
    const Plan& plan = launch_.plan;
    memory_.fence_async_proxy();
    for (int32_t row = task.begin; row < task.end; ++row) bodies_.pull(order, row, memory_);
    memory_.wait_copies();
    // Neighbouring rows of one block are announced together.
    int32_t block = -1;
    uint32_t num_rows = 0;
    const auto announce = [&] {
      if (num_rows > 0) memory_.release_add(&flags(order).rows_ready[block], num_rows, Scope::kRank);
      num_rows = 0;
    };
    for (int32_t row = task.begin; row < task.end; ++row) {
      for_each_pulled_row(plan, row, [&](int32_t pulled) {
        const int32_t next = order.physical_block(pulled / kBlockRows);
        if (next != block) announce();
        block = next;
        ++num_rows;
      });
    }
    announce();
    memory_.release_add(flags(order).pulled, 1, Scope::kRank);
    return true;
  }

  bool announce_pulls_done(const TaskOrder& order, int32_t ticket) {
    const WaitSite site{wait_task(CommTaskKind::kPullsDone), ticket, FlagKind::kPulled, -1, -1};
    if (!gate_.wait(flags(order).pulled, static_cast<uint32_t>(order.comm().num_pull_tasks()), Scope::kRank, site)) {
      return false;
    }
    for (int32_t peer = 0; peer < launch_.num_ranks(); ++peer) {
      memory_.release(&launch_.controls[peer]->pulls_done[launch_.rank()], launch_.epoch_of(order.pass()),
                      Scope::kSystem);
    }
    return true;
  }

  bool combine(const TaskOrder& order, const CommTask& task, int32_t ticket) {
    const Plan& plan = launch_.plan;
    const int64_t slots = plan.shape.slots_per_token();
    for (int32_t position = task.begin; position < task.end; ++position) {
      const int32_t entry_idx = plan.combine_order[position];
      const Entry& entry = plan.entries[entry_idx];
      for (int32_t n = 0; n < entry.num_rows; ++n) {
        if (!wait_output(order, plan.fan_rows[entry.fan_begin + n] / kBlockRows, ticket)) return false;
      }
      memory_.fence_async_proxy();
      bodies_.combine(order, entry_idx, memory_);
      memory_.wait_copies();
      memory_.release(&launch_.peers[entry.source].arrived[entry.token * slots + entry.slot],
                      launch_.epoch_of(order.pass()), Scope::kSystem);
    }
    return true;
  }

  bool sum_tokens(const TaskOrder& order, const CommTask& task, int32_t ticket) {
    const Plan& plan = launch_.plan;
    const int64_t slots = plan.shape.slots_per_token();
    for (int32_t token = task.begin; token < task.end; ++token) {
      const int32_t* experts = launch_.topk_idx + int64_t{token} * plan.shape.top_k;
      const int32_t* rows = plan.route_row + plan.route_offset(launch_.rank(), token);
      const uint64_t all = ranks_of_token(plan.shape, experts);
      uint64_t senders = ranks_of_token_in_pass(plan, experts, rows, order.pass());
      for (int32_t peer = 0; senders != 0; ++peer, senders >>= 1) {
        if ((senders & 1) == 0) continue;
        const int64_t slot = token * slots + slot_of_rank(all, peer);
        const WaitSite site{wait_task(CommTaskKind::kSumTokens), ticket, FlagKind::kArrived, slot, peer};
        if (!gate_.wait(&launch_.peers[launch_.rank()].arrived[slot], launch_.epoch_of(order.pass()), Scope::kSystem,
                        site)) {
          return false;
        }
      }
      bodies_.sum_token(order, token, memory_);
    }
    return true;
  }

  bool drain(const TaskOrder& order, int32_t ticket) {
    for (int32_t peer = 0; peer < launch_.num_ranks(); ++peer) {
      const WaitSite site{wait_task(CommTaskKind::kDrain), ticket, FlagKind::kPullsDone, -1, peer};
      if (!gate_.wait(&launch_.controls[launch_.rank()]->pulls_done[peer], launch_.epoch_of(order.pass()),
                      Scope::kSystem, site)) {
        return false;
      }
    }
    return true;
  }

  bool run_matrix_task(const TaskOrder& order, const MatrixTask& task, int32_t ticket) {
    if (!wait_inputs(order, task, ticket)) return false;
    memory_.fence_async_proxy();
    bodies_.matrix(order, task, memory_);
    if (is_wgrad(task.kind)) return true;
    memory_.wait_copies();
    const bool makes_mid = task.kind == TaskKind::kGateUp || task.kind == TaskKind::kDownDgrad;
    uint32_t* counters = makes_mid ? flags(order).mid_ready : flags(order).out_ready;
    memory_.release_add(&counters[order.physical_block(task.m_tile)], 1, Scope::kRank);
    return true;
  }

  bool wait_inputs(const TaskOrder& order, const MatrixTask& task, int32_t ticket) {
    switch (task.kind) {
      case TaskKind::kGateUp:
      case TaskKind::kDownDgrad: {
        const int32_t block = order.physical_block(task.m_tile);
        return gate_.wait(&flags(order).rows_ready[block], uint32_t{kBlockRows}, Scope::kRank,
                          {wait_task(task.kind), ticket, FlagKind::kRowsReady, block, -1});
      }
      case TaskKind::kDown:
      case TaskKind::kGateUpDgrad:
        return wait_mid(order, task.m_tile, wait_task(task.kind), ticket);
      case TaskKind::kDownWgrad:
      case TaskKind::kGateUpWgrad: {
        const BlockRange blocks = order.blocks(task.local_expert);
        for (int32_t block = blocks.begin; block < blocks.end; ++block) {
          if (!wait_mid(order, block, wait_task(task.kind), ticket)) return false;
        }
        return true;
      }
    }
    return false;
  }

  bool wait_mid(const TaskOrder& order, int32_t virtual_block, WaitTask task, int32_t ticket) {
    const TaskKind producer = launch_.direction == Direction::kForward ? TaskKind::kGateUp : TaskKind::kDownDgrad;
    const int32_t block = order.physical_block(virtual_block);
    return gate_.wait(&flags(order).mid_ready[block], static_cast<uint32_t>(order.num_n_tiles(producer)), Scope::kRank,
                      {task, ticket, FlagKind::kMidReady, block, -1});
  }

  // What combine sums: o in forward, dx in backward; without dx it still brings home the router gradients of stage mid.
  bool wait_output(const TaskOrder& order, int32_t virtual_block, int32_t ticket) {
    const WaitTask task = wait_task(CommTaskKind::kCombine);
    const bool forward = launch_.direction == Direction::kForward;
    if (!forward && !launch_.work.dgrad) return wait_mid(order, virtual_block, task, ticket);
    const int32_t block = order.physical_block(virtual_block);
    const auto tiles = static_cast<uint32_t>(order.num_n_tiles(forward ? TaskKind::kDown : TaskKind::kGateUpDgrad));
    return gate_.wait(&flags(order).out_ready[block], tiles, Scope::kRank,
                      {task, ticket, FlagKind::kOutReady, block, -1});
  }

  const Launch& launch_;
  Memory& memory_;
  Bodies& bodies_;
  Gate<Memory> gate_;
};

}  // namespace weft
