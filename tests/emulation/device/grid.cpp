#include "grid.h"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"
#include "random.h"

namespace emulation {

Moment now{};
Random launch_random(0);

namespace {

constexpr size_t most_threads = 1024, most_parameter_bytes = 4096;

// An H100; two small devices, on which few blocks do everything; and one so large that each block of a huge tensor has
// little to do.
constexpr std::array<Properties, 4> devices{
    {{"H100", 132}, {"20 multiprocessors", 20}, {"2 multiprocessors", 2}, {"4000 multiprocessors", 4000}}};

// Threads that a multiprocessor holds. Other capabilities are none of the emulator's.
int threads_of_multiprocessor(int capability) {
  switch (capability) {
    case 75:
      return 1024;
    case 86:
    case 89:
    case 120:
      return 1536;
    case 80:
    case 90:
    case 100:
      return 2048;
  }
  throw std::runtime_error("emulated device: an unknown capability, " + std::to_string(capability));
}

enum class State { ready, at_barrier, in_shuffle, done };

struct Thread {
  Fiber fiber;
  State state;
  Site site;
  // Of a shuffle: its mask, the lane it reads from, what it gives, and what it gets.
  unsigned mask, source;
  uint64_t given, received;
};

struct Kernel {
  void (*body)(void*) = nullptr;
  void* parameters = nullptr;
  std::string name;
  int most_threads = 0, least_blocks = 0;  // its launch bounds
  bool asked = false;                      // for its name and bounds only
  dim3 grid, block;
  unsigned index = 0;  // of the running block
};

std::array<Thread, most_threads> threads;
unsigned thread_count = 0;
// Since the settings were made: a seed gives the same orders again.
uint64_t launches = 0;
// These launches, a line each: the kernel, its blocks, and how many of them a multiprocessor holds at least.
std::string launched;
std::vector<uint16_t> ready;
Thread* running = nullptr;
Kernel kernel;
std::string error;

// The kernel's name and what distinguishes instances of a template, from __PRETTY_FUNCTION__.
std::string short_name(const std::string& signature) {
  const size_t end = signature.find('('), begin = signature.find_last_of(": ", end) + 1;
  std::string name = signature.substr(begin, end - begin);
  const size_t with = signature.find(" [with ");
  if (with != std::string::npos) {
    std::string instance = signature.substr(with + 7, signature.rfind(']') - with - 7);
    for (const char* prefix : {"inplace_abn_emulated::cuda::", "inplace_abn_emulated::", "{anonymous}::"}) {
      for (size_t at; (at = instance.find(prefix)) != std::string::npos;)
        instance.erase(at, std::string(prefix).size());
    }
    const size_t aliases = instance.find("; int64_t = ");
    name += " <" + instance.substr(0, aliases) + ">";
  }
  return name;
}

std::string format(const char* what, va_list arguments) {
  std::array<char, 1024> text;
  std::vsnprintf(text.data(), text.size(), what, arguments);
  return text.data();
}

bool same(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

void wait(State state, Site site) {
  running->state = state;
  running->site = site;
  running->fiber.pause();
}

unsigned index_of(const Thread& thread) {
  return static_cast<unsigned>(&thread - threads.data());
}

std::string name_of(const Thread& thread) {
  return "thread " + std::to_string(index_of(thread));
}

std::string place_of(const Thread& thread) {
  return kernel.name + ", block " + std::to_string(kernel.index) + ", " + name_of(thread) + ": ";
}

void make_ready(Thread& thread) {
  thread.state = State::ready;
  ready.push_back(static_cast<uint16_t>(index_of(thread)));
}

void run_thread() {
  kernel.body(kernel.parameters);
  running->state = State::done;
  running->fiber.pause();
}

std::string whereabouts(const Thread& thread) {
  if (thread.state == State::done) return "has left the kernel";
  const std::string file = thread.site.file;
  const std::string line = file.substr(file.rfind('/') + 1) + ":" + std::to_string(thread.site.line);
  return (thread.state == State::at_barrier ? "waits at the barrier of " : "waits in the shuffle of ") + line;
}

// `thread` waits for `other`, which never comes.
void fail_for(const Thread& thread, const char* what, const Thread& other) {
  error = place_of(thread) + what + ": " + name_of(thread) + " " + whereabouts(thread) + ", " + name_of(other) + " " +
          whereabouts(other);
}

// All threads have paused: they have all left, or all wait at one barrier, or some wait for ever.
bool release_barrier() {
  const auto begin = threads.begin(), end = begin + thread_count;
  const auto waiting = std::find_if(begin, end, [](const Thread& t) { return t.state != State::done; });
  if (waiting == end) return false;
  const auto shuffling = std::find_if(begin, end, [](const Thread& t) { return t.state == State::in_shuffle; });
  if (shuffling != end) {
    const unsigned warp = index_of(*shuffling) / warp_lanes * warp_lanes;
    for (unsigned lane = 0; lane < warp_lanes; ++lane) {
      const Thread& other = threads[warp + lane];
      if ((shuffling->mask >> lane & 1) == 0) continue;
      if (other.state != State::in_shuffle || other.mask != shuffling->mask || !same(other.site, shuffling->site)) {
        fail_for(*shuffling, "a shuffle with an absent partner", other);
        return false;
      }
    }
  }
  for (auto other = begin; other != end; ++other) {
    if (other->state != State::at_barrier || !same(other->site, waiting->site)) {
      fail_for(*waiting, "a barrier that not all threads reach", *other);
      return false;
    }
  }
  for (auto thread = begin; thread != end; ++thread) make_ready(*thread);
  count_barrier();
  return true;
}

void run_block(unsigned index) {
  kernel.index = index;
  begin_block();
  ready.clear();
  for (unsigned i = 0; i < thread_count; ++i) {
    threads[i].fiber.start(run_thread);
    make_ready(threads[i]);
  }
  do {
    while (!ready.empty() && error.empty()) {
      std::swap(ready[launch_random.below(ready.size())], ready.back());
      now.thread = ready.back();
      ready.pop_back();
      running = &threads[now.thread];
      running->fiber.resume();
      running = nullptr;
    }
  } while (error.empty() && release_barrier());
}

// The blocks in the order in which they run: all, or of a large grid the first, the last, and some.
std::vector<unsigned> choose_blocks() {
  const uint64_t count = kernel.grid.x, sample = settings().sample > 0 ? settings().sample : count;
  std::vector<unsigned> blocks;
  if (sample >= count) {
    blocks.resize(count);
    std::iota(blocks.begin(), blocks.end(), 0u);
  } else {
    std::set<unsigned> chosen{0u, static_cast<unsigned>(count - 1)};
    while (chosen.size() < sample) chosen.insert(static_cast<unsigned>(launch_random.below(count)));
    blocks.assign(chosen.begin(), chosen.end());
  }
  launch_random.shuffle(blocks);
  return blocks;
}

void run_blocks(uint64_t seed) {
  launch_random = Random(seed);
  begin_launch(settings().sample > 0);
  for (const unsigned block : choose_blocks()) {
    run_block(block);
    if (!error.empty()) throw std::runtime_error("emulated device: " + std::exchange(error, {}));
  }
}

// Has the kernel tell its name and bounds, by a thread that goes no further.
void ask_kernel() {
  kernel.asked = true;
  kernel.name = "a kernel that is none";
  kernel.most_threads = static_cast<int>(most_threads);
  running = &threads[0];
  running->fiber.start(run_thread);
  running->fiber.resume();
  running = nullptr;
  kernel.asked = false;
}

void require_launch(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("emulated device: the launch of " + kernel.name + ": " + what);
}

void check_launch(dim3 grid, dim3 block, size_t shared, size_t parameter_bytes) {
  constexpr unsigned most_y = 65535, most_x = std::numeric_limits<int32_t>::max();
  const auto text = [](dim3 d) {
    return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
  };
  const uint64_t count = uint64_t{block.x} * block.y * block.z;
  require_launch(grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= most_x && grid.y <= most_y && grid.z <= most_y,
                 "a grid of " + text(grid) + " blocks is empty or beyond 2147483647 x 65535 x 65535");
  require_launch(count > 0 && count <= most_threads && block.z <= 64,
                 "a block of " + text(block) + " threads is empty or beyond 1024, 64 in z");
  require_launch(
      count <= static_cast<uint64_t>(kernel.most_threads),
      "a block of " + text(block) + " threads is beyond the launch bound of " + std::to_string(kernel.most_threads));
  const int held = threads_of_multiprocessor(settings().capability);
  require_launch(kernel.least_blocks * kernel.most_threads <= held,
                 std::to_string(kernel.least_blocks) + " blocks of " + std::to_string(kernel.most_threads) +
                     " threads are more than a multiprocessor holds, " + std::to_string(held));
  require_launch(parameter_bytes <= most_parameter_bytes,
                 std::to_string(parameter_bytes) + " bytes of parameters are beyond 4096");
  require_launch(grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1 && shared == 0,
                 "the emulator knows grids and blocks in x only, and no dynamic shared memory");
}

}  // namespace

Settings& settings() {
  static Settings value;
  return value;
}

int device_count() {
  return static_cast<int>(devices.size());
}

int current_device() {
  return settings().device;
}

const Properties& device_properties(int index) {
  return devices.at(index);
}

bool in_kernel() {
  return running != nullptr;
}

bool on_stack(const void* address) {
  return running->fiber.holds(address);
}

void fail(const char* what, ...) {
  va_list arguments;
  va_start(arguments, what);
  const std::string text = format(what, arguments);
  va_end(arguments);
  if (running == nullptr) throw std::runtime_error("emulated device: " + text);
  error = place_of(*running) + text;
  running->fiber.pause();
  __builtin_unreachable();
}

void enter_kernel(const char* signature, int most, int least_blocks) {
  if (!kernel.asked) return;
  kernel.name = short_name(signature);
  kernel.most_threads = most;
  kernel.least_blocks = least_blocks;
  running->fiber.pause();
}

dim3 thread_index() {
  return now.thread;
}

dim3 block_size() {
  return kernel.block;
}

unsigned lane_index() {
  return now.thread % warp_lanes;
}

dim3 block_index() {
  return kernel.index;
}

dim3 grid_size() {
  return kernel.grid;
}

void synchronise(Site site) {
  wait(State::at_barrier, site);
}

uint64_t shuffle_bits(Site site, unsigned mask, uint64_t value, unsigned source) {
  const unsigned lane = now.thread % warp_lanes;
  Thread* const warp = running - lane;
  if ((mask >> lane & 1) == 0) fail("a shuffle whose mask %#x leaves out the calling lane %u", mask, lane);
  if ((mask >> source & 1) == 0) fail("a shuffle from lane %u, which its mask %#x leaves out", source, mask);
  Thread& own = *running;
  own.mask = mask;
  own.source = source;
  own.given = value;
  own.state = State::in_shuffle;
  own.site = site;
  bool complete = true;
  for (unsigned i = 0; i < warp_lanes && complete; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const Thread& other = warp[i];
    if (index_of(other) >= thread_count) {
      fail("a shuffle with an absent partner: the block has no thread %u", index_of(other));
    }
    complete = other.state == State::in_shuffle && other.mask == mask && same(other.site, site);
  }
  if (complete) {
    for (unsigned i = 0; i < warp_lanes; ++i) {
      if ((mask >> i & 1) != 0) warp[i].received = warp[warp[i].source].given;
    }
    for (unsigned i = 0; i < warp_lanes; ++i) {
      if ((mask >> i & 1) != 0) make_ready(warp[i]);
    }
  }
  own.fiber.pause();
  return own.received;
}

void run_grid(dim3 grid, dim3 block, size_t dynamic_shared, void (*body)(void*), void* parameters,
              size_t parameter_bytes) {
  kernel = Kernel{.body = body, .parameters = parameters, .grid = grid, .block = block};
  set_parameters(parameters, parameter_bytes);
  ask_kernel();
  check_launch(grid, block, dynamic_shared, parameter_bytes);
  const unsigned held = kernel.least_blocks * kernel.most_threads / block.x;
  launched += kernel.name + "\t" + std::to_string(grid.x) + "\t" + std::to_string(held) + "\n";
  thread_count = block.x;
  const uint64_t seed = Random(settings().seed ^ ++launches << 32).next();
  if (settings().orders < 2 || settings().sample > 0) return run_blocks(seed);
  const Snapshot before;
  run_blocks(seed);
  const Snapshot after;
  for (int order = 1; order < settings().orders; ++order) {
    before.restore();
    run_blocks(seed + order);
    const std::string difference = after.difference();
    if (!difference.empty()) {
      throw std::runtime_error("emulated device: " + kernel.name +
                               ": results depend on the order of blocks and threads: " + difference);
    }
  }
}

}  // namespace emulation

extern "C" {
#define EMULATION_EXPORT __attribute__((visibility("default")))

EMULATION_EXPORT void emulation_set(uint64_t seed, int orders, int device, int64_t sample, int capability) {
  emulation::settings() = {seed, orders, device, sample, capability};
  emulation::launches = 0;
  emulation::launched.clear();
}

EMULATION_EXPORT const char* emulation_launched() {
  return emulation::launched.c_str();
}

EMULATION_EXPORT const char* emulation_device_name(int index) {
  return index < emulation::device_count() ? emulation::device_properties(index).name : nullptr;
}

__attribute__((visibility("hidden"))) AOTITorchError emulation_current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
}
