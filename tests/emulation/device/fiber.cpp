#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if !defined(EMULATION_USES_UCONTEXT)
// Saves the registers that a function must keep on one stack and takes them up from the other.
asm(R"(
.pushsection .text
.p2align 4
.type emulation_switch_stacks, @function
emulation_switch_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulation_switch_stacks, . - emulation_switch_stacks
.popsection
)");
extern "C" __attribute__((visibility("hidden"))) void emulation_switch_stacks(void** from, void* to);
#endif

// Of the address sanitizer, where kernels are built with it (sanitize.py).
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);

namespace emulation {
namespace {

#if defined(EMULATION_USES_UCONTEXT)
ucontext_t scheduler;
#else
void* scheduler = nullptr;
constexpr int kept_registers = 6;
#endif

// Stacks are kept for as long as the process lives. Below each lies a page that nobody may touch.
char* make_stack(size_t bytes) {
  constexpr size_t page = 4096;
  void* const memory =
      mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page, PROT_NONE);
  return static_cast<char*>(memory) + page;
}

}  // namespace

void Fiber::start(void (*entry)()) {
  if (stack_ == nullptr) stack_ = make_stack(stack_bytes);
  // Functions that were dropped have left what guards their variables.
  if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(stack_, stack_bytes);
#if defined(EMULATION_USES_UCONTEXT)
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#else
  // As if `entry` had been called: its return address, which is never used, lies at a multiple of 16 plus 8.
  auto* top = reinterpret_cast<void**>(stack_ + stack_bytes) - 3;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  stack_pointer_ = top - kept_registers;
#endif
}

void Fiber::resume() {
#if defined(EMULATION_USES_UCONTEXT)
  swapcontext(&scheduler, &context_);
#else
  emulation_switch_stacks(&scheduler, stack_pointer_);
#endif
}

void Fiber::pause() {
#if defined(EMULATION_USES_UCONTEXT)
  swapcontext(&context_, &scheduler);
#else
  emulation_switch_stacks(&stack_pointer_, scheduler);
#endif
}

}  // namespace emulation
