#include "protocol/explorer.hpp"

#include <algorithm>
#include <cstdlib>

namespace weft::explore {

Outcome Explorer::explore(const Limits& limits, const std::function<void()>& reset,
                          const std::function<void(int32_t)>& run_worker, const std::function<std::string()>& check) {
  limits_ = limits;
  run_worker_ = &run_worker;
  current_ = this;
  while (fibers_.size() < machine_.num_workers()) fibers_.emplace_back(kStackBytes);
  path_.clear();
  seen_.clear();
  random_.seed(1);

  Outcome outcome;
  for (;;) {
    reset();
    run_once();
    ++outcome.num_executions;
    if (end_ == End::kFinished) {
      const std::string wrong = check();
      if (!wrong.empty()) {
        end_ = End::kFailed;
        outcome.verdict = Verdict::kWrongValue;
        outcome.words = wrong;
      }
    } else if (end_ == End::kFailed) {
      outcome.verdict = machine_.verdict();
      outcome.words = machine_.failure();
    }
    if (end_ == End::kFailed) {
      constexpr size_t kShownSteps = 60;
      outcome.words += "\nworkers that have not finished:\n" + machine_.blocked_workers() + "last steps:\n" +
                       machine_.trace(kShownSteps);
      break;
    }
    if (limits_.random_walks > 0) {
      if (outcome.num_executions == limits_.random_walks) break;
    } else if (!backtrack()) {
      break;
    } else if (outcome.num_executions == limits_.max_executions) {
      outcome.complete = false;
      break;
    }
  }
  outcome.num_states = static_cast<int64_t>(seen_.size());
  return outcome;
}

void Explorer::run_once() {
  machine_.reset();
  for (Fiber& fiber : fibers_) fiber.start(&Explorer::enter_fiber);
  depth_ = 0;
  preemptions_left_ = limits_.max_preemptions;
  stay_ = static_cast<double>(random_() % 4) * 0.33;
  end_ = End::kRunning;
  running_ = 0;
  running_ = choose();
  Fiber::switch_between(main_, fibers_[static_cast<size_t>(running_)]);
}

void Explorer::enter_fiber() {
  Explorer& self = *current_;
  Fiber& fiber = self.fibers_[static_cast<size_t>(self.running_)];
  fiber.arrived();
  self.machine_.resume(self.running_);
  (*self.run_worker_)(self.running_);
  self.machine_.finish(self.running_);
  self.reschedule();
  std::abort();  // a finished worker is never chosen again
}

void Explorer::reschedule() {
  const int32_t previous = running_;
  running_ = choose();
  machine_.resume(running_);
  if (running_ == previous) return;
  Fiber::switch_between(fibers_[static_cast<size_t>(previous)], fibers_[static_cast<size_t>(running_)]);
}

void Explorer::stop() { end(End::kFailed); }

void Explorer::end(End how) {
  end_ = how;
  Fiber::switch_between(fibers_[static_cast<size_t>(running_)], main_);
}

// Takes copy steps until a worker is chosen.
int32_t Explorer::choose() {
  for (;;) {
    machine_.list_actions(running_, actions_);
    const bool can_continue = machine_.is_runnable(running_);
    if (actions_.empty()) {
      if (machine_.all_finished()) end(End::kFinished);
      if (limits_.deadlines) machine_.list_deadlines(actions_);
      if (actions_.empty()) machine_.fail(Verdict::kDeadlock, "dead-lock: nothing can go on");
    }
    if (machine_.num_steps() > kMaxSteps) machine_.fail(Verdict::kLivelock, "livelock: no end within the step limit");
    const Action action = actions_[actions_.size() == 1 ? 0 : pick(can_continue)];
    switch (action.kind) {
      case Action::Kind::kWorker:
        return action.idx;
      case Action::Kind::kCopy:
        machine_.do_copy_step(action.idx);
        break;
      case Action::Kind::kDeadline:
        machine_.fire_deadline(action.idx);
        break;
    }
  }
}

size_t Explorer::pick(bool can_continue) {
  if (limits_.random_walks > 0) {
    if (can_continue && std::uniform_real_distribution<>(0, 1)(random_) < stay_) return 0;
    return random_() % actions_.size();
  }
  if (depth_ == path_.size()) {
    if (seen_before(can_continue)) end(End::kSeenBefore);
    path_.push_back({0, static_cast<uint8_t>(actions_.size()), can_continue, preemptions_left_});
  }
  const Choice& choice = path_[depth_++];
  preemptions_left_ = choice.preemptions_left - (choice.can_continue && choice.chosen > 0 ? 1 : 0);
  return choice.chosen;
}

bool Explorer::seen_before(bool can_continue) {
  uint64_t state = machine_.state_hash();
  // With a bound it matters who may go on at no cost.
  if (limits_.max_preemptions >= 0 && can_continue) state = mix(state, static_cast<uint64_t>(running_) + 1);
  const auto [entry, is_new] = seen_.try_emplace(state, preemptions_left_);
  if (!is_new && entry->second >= preemptions_left_) return true;
  entry->second = preemptions_left_;
  return false;
}

// Moves to the next path in depth-first order; false when there is none.
bool Explorer::backtrack() {
  while (!path_.empty()) {
    Choice& choice = path_.back();
    const bool may_preempt = limits_.max_preemptions < 0 || choice.preemptions_left > 0;
    if (choice.chosen + 1 < choice.count && (!choice.can_continue || may_preempt)) {
      ++choice.chosen;
      return true;
    }
    path_.pop_back();
  }
  return false;
}

}  // namespace weft::explore
