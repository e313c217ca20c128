// The calls that a compiler puts before loads and stores where it is asked for a thread sanitizer, and the instructions
// of PTX in use. This file itself is compiled without.

#include <cstdint>
#include <cstring>

#include "access.h"
#include "grid.h"

namespace emulation {

void ptx(const char* text, void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (std::strcmp(text, "st.global.v4.u32 [%0], {%1, %2, %3, %4};") != 0) fail("an unknown instruction: %s", text);
  const uint32_t words[] = {a, b, c, d};
  require_aligned(to, sizeof(words));
  check_access(to, sizeof(words), true);
  std::memcpy(to, words, sizeof(words));
}

namespace {

void check_typed(const void* address, size_t bytes, bool writes) {
  require_aligned(address, bytes);
  check_access(address, bytes, writes);
}

}  // namespace
}  // namespace emulation

extern "C" {
#define EMULATION_TYPED(bytes)                        \
  void __tsan_read##bytes(void* address) {            \
    emulation::check_typed(address, bytes, false);    \
  }                                                   \
  void __tsan_write##bytes(void* address) {           \
    emulation::check_typed(address, bytes, true);     \
  }                                                   \
  void __tsan_unaligned_read##bytes(void* address) {  \
    emulation::check_access(address, bytes, false);   \
  }                                                   \
  void __tsan_unaligned_write##bytes(void* address) { \
    emulation::check_access(address, bytes, true);    \
  }
EMULATION_TYPED(1)
EMULATION_TYPED(2)
EMULATION_TYPED(4)
EMULATION_TYPED(8)
EMULATION_TYPED(16)

void __tsan_read_range(void* address, unsigned long bytes) {
  emulation::check_access(address, bytes, false);
}
void __tsan_write_range(void* address, unsigned long bytes) {
  emulation::check_access(address, bytes, true);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// The host's side of a launch has static variables, reference counts, and classes with virtual functions.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
int __tsan_atomic32_fetch_add(volatile int* address, int value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
