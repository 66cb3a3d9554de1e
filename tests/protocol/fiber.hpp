// Fibers: workers of an explored system, switched by hand on one thread. Nothing on a fiber's stack may own memory: an
// execution that ends early abandons its fibers where they stand.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace weft::explore {

class Fiber {
 public:
  Fiber() = default;  // the thread's own stack
  explicit Fiber(size_t stack_bytes) : stack_(new char[stack_bytes]), stack_bytes_(stack_bytes) {}

  // The next switch to this fiber calls `entry` on a fresh stack. `entry` must begin with arrived() and never return.
  void start(void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = stack_bytes_;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  static void switch_between(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom(), to.stack_bytes_);
    thread_fiber_ = from.stack_ ? thread_fiber_ : &from;
#endif
    swapcontext(&from.context_, &to.context_);
    from.arrived();
  }

  // Tells the address sanitizer which stack this is.
  void arrived() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
    if (thread_fiber_ != nullptr && thread_fiber_->stack_bytes_ == 0) {
      thread_fiber_->thread_bottom_ = bottom;
      thread_fiber_->stack_bytes_ = bytes;
    }
#endif
  }

 private:
  ucontext_t context_{};
  std::unique_ptr<char[]> stack_;
  size_t stack_bytes_ = 0;
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom() const { return stack_ ? stack_.get() : thread_bottom_; }
  void* fake_stack_ = nullptr;
  const void* thread_bottom_ = nullptr;
  static inline thread_local Fiber* thread_fiber_ = nullptr;
#endif
};

}  // namespace weft::explore
