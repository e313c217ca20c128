// A device that runs on the host: launches, blocks one after another in random order, and a block's threads as fibers,
// which run one at a time, in random order, from barrier to barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "access.h"
#include "translated.h"

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulation {

struct Properties {
  const char* name;
  int multiprocessors;
};

int device_count();
int current_device();
const Properties& device_properties(int index);

// How launches run. `capability`: of every device, 75 for 7.5; it decides what a multiprocessor holds. `orders`: in how
// many random orders each, with equal bits. `sample`: how many blocks of each run at most, the first and the last among
// them; 0 means all.
struct Settings {
  uint64_t seed = 0;
  int orders = 2, device = 0;
  int64_t sample = 0;
  int capability = 90;
};
Settings& settings();

// Ends the running thread's launch with an error that names kernel, block and thread; on the host, throws it.
[[noreturn]] void fail(const char* what, ...) __attribute__((format(printf, 1, 2)));
bool in_kernel();
// Whether the address is in the running thread's own memory.
bool on_stack(const void* address);
// Of the running thread: the number of its block, counted over all launches, of the barriers passed, and its own.
struct Moment {
  uint32_t block;
  uint16_t barriers, thread;
};
extern Moment now;

[[gnu::const]] dim3 thread_index();
[[gnu::const]] dim3 block_size();
[[gnu::const]] unsigned lane_index();
dim3 block_index();
dim3 grid_size();

void synchronise(Site site);

constexpr unsigned warp_lanes = 32;

// `value` of the lane `source`.
uint64_t shuffle_bits(Site site, unsigned mask, uint64_t value, unsigned source);
template <typename T>
T shuffle(Site site, unsigned mask, T value, unsigned source) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle_bits(site, mask, bits, source);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// Of the lane so many lanes up, or of the calling one where there is none.
template <typename T>
T shuffle_down(Site site, unsigned mask, T value, unsigned lanes) {
  const unsigned lane = lane_index();
  return shuffle(site, mask, value, lane + lanes < warp_lanes ? lane + lanes : lane);
}
template <typename T>
T shuffle_xor(Site site, unsigned mask, T value, unsigned lanes) {
  return shuffle(site, mask, value, lane_index() ^ lanes);
}
// A bit for each lane.
inline unsigned ballot(Site site, unsigned mask, bool value) {
  unsigned bits = value ? 1u << lane_index() : 0;
  for (unsigned lanes = 1; lanes < warp_lanes; lanes *= 2) bits |= shuffle_xor(site, mask, bits, lanes);
  return bits;
}

// Runs body(parameters) once for every thread of the grid.
void run_grid(dim3 grid, dim3 block, size_t dynamic_shared, void (*body)(void*), void* parameters,
              size_t parameter_bytes);

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared, void*,
            const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::remove_const_t<Parameters>...> parameters;
  } call{kernel, {arguments...}};
  const auto body = [](void* data) {
    const auto& run = *static_cast<const Call*>(data);
    std::apply(run.kernel, run.parameters);
  };
  run_grid(grid, block, dynamic_shared, body, &call, sizeof(call));
}

}  // namespace emulation
