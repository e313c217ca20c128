// What CUDA's own syntax becomes (translate.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

struct Site {
  const char* file;
  int line;
};

// Called by a kernel's every thread first.
void enter_kernel(const char* signature, int most_threads = 1024, int least_blocks = 0);

void* shared_variable(const void* key, size_t bytes, size_t alignment);

// `__shared__ T name;` is `T& name = shared<T>([] {})`: the lambda's type tells variables apart, and instances of
// templates.
template <typename T, typename Key>
T& shared(const Key&) {
  static const char key = 0;
  return *static_cast<T*>(shared_variable(&key, sizeof(T), alignof(T)));
}

// One instruction of PTX with its operands.
void ptx(const char* text, void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

}  // namespace emulation
