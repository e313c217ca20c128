// Threads of one block take turns on the host's thread, each on a stack of its own.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(EMULATION_UCONTEXT)
#include <ucontext.h>
#define EMULATION_USES_UCONTEXT
#endif

namespace emulation {

class Fiber {
 public:
  // What is left on the stack of an earlier run is dropped, not unwound.
  void start(void (*entry)());
  // From the scheduler: runs the fiber until it pauses.
  void resume();
  // From the fiber: back to the scheduler.
  void pause();

  bool holds(const void* address) const {
    const auto* byte = static_cast<const char*>(address);
    return byte >= stack_ && byte < stack_ + stack_bytes;
  }

 private:
  static constexpr size_t stack_bytes = 256 * 1024;

  char* stack_ = nullptr;
#if defined(EMULATION_USES_UCONTEXT)
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace emulation
