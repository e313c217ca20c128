// The memory that a kernel may access: the areas of one call, and what each element of them has seen.
//
// Kernels are compiled with the instrumentation of a thread sanitizer, whose calls before every load and store are
// answered here (instrumentation.cpp): each access is checked, byte by byte, with the block and the thread that makes
// it. Two accesses of one element by two threads of which one writes are a race, unless a barrier of their block lies
// between them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulation {

enum Use : unsigned { use_read = 1, use_write = 2, use_both = 3 };

// How often a dimension steps, and by how many elements.
struct Dim {
  int64_t count, stride;
};

// The elements of one tensor, perhaps with gaps, which do not belong to it. `fresh`: nobody has written them yet.
struct Area {
  std::string name;
  const void* data;
  int64_t element_bytes;
  std::vector<Dim> dims;
  unsigned uses;
  bool fresh = false;
};

// What an op may access is known from here on, until `end_call`.
void begin_call();
void add_area(const Area& area);
void end_call();

// Registers a host range that threads may read: a kernel's parameters.
void set_parameters(const void* data, size_t bytes);

// A vector access of so many bytes at this address.
void require_aligned(const void* address, size_t bytes);
void check_access(const void* address, size_t bytes, bool writes);

// --- For the grid ----------------------------------------------------------------------------------------------------

constexpr size_t shared_limit = 48 * 1024;

// Every block of every launch has a number of its own, in the order in which they run.
void begin_launch(bool sampled);
void begin_block();
void count_barrier();

// Static shared memory of the running block, filled with NaN and random bits where it is new.
void* shared_variable(const void* key, size_t bytes, size_t alignment);

// The written elements of all areas, and which of them count as written.
class Snapshot {
 public:
  Snapshot();
  ~Snapshot();
  void restore() const;
  // Where areas now differ from it, in words; empty where they do not.
  std::string difference() const;

 private:
  struct Saved;
  std::vector<Saved> saved_;
};

// As torch's own, on the CPU.
AOTITorchError allocate_scratch(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                int32_t device_type, int32_t device_index, AtenTensorHandle* result);

}  // namespace emulation
