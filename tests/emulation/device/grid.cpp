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

constexpr unsigned warp_lanes = 32;
constexpr size_t most_parameter_bytes = 4096;

// An H100; a small device, on which few blocks do everything; one whose cache holds so little that the ops go through
// the channels of small tensors group by group; and one so large that each block of a huge tensor has little to do. The
// less shared memory, the more blocks a cluster has, or the sooner there is none.
constexpr std::array<Properties, 4> devices{{{"H100", 132, 50 << 20, 227 << 10},
                                             {"20 multiprocessors", 20, 2 << 20, 12 << 10},
                                             {"tiny cache", 2, 16 << 10, 40 << 10},
                                             {"4000 multiprocessors", 4000, 1 << 30, 227 << 10}}};

enum class State { ready, at_barrier, at_cluster_barrier, in_shuffle, done };

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
  int most_threads = 0;
  bool asked = false;  // for its name and bounds only
  Shape shape{};
  unsigned first = 0;  // block of the running cluster
};

// Of a cluster, block by block.
std::array<Thread, size_t{most_threads} * most_ranks> threads;
std::array<uint16_t, most_ranks> barriers;
unsigned thread_count = 0;  // of a block
// Since the settings were made: a seed gives the same orders again.
uint64_t launches = 0;
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

// In the cluster.
unsigned index_of(const Thread& thread) {
  return static_cast<unsigned>(&thread - threads.data());
}

std::string name_of(const Thread& thread) {
  return "thread " + std::to_string(index_of(thread) % thread_count);
}

std::string place_of(const Thread& thread) {
  return kernel.name + ", block " + std::to_string(kernel.first + index_of(thread) / thread_count) + ", " +
         name_of(thread) + ": ";
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
  const char* const what = thread.state == State::at_barrier           ? "waits at the barrier of "
                           : thread.state == State::at_cluster_barrier ? "waits at the cluster's barrier of "
                                                                       : "waits in the shuffle of ";
  return what + line;
}

// `thread` waits for `other`, which never comes.
void fail_for(const Thread& thread, const char* what, const Thread& other) {
  error = place_of(thread) + what + ": " + name_of(thread) + " " + whereabouts(thread) + ", " + name_of(other) + " " +
          whereabouts(other);
}

bool is_barrier(State state) {
  return state == State::at_barrier || state == State::at_cluster_barrier;
}

// Whether all threads from `begin` to `end` wait at the barrier that the first of them waits at; an error if they never
// will.
bool all_wait(Thread* begin, Thread* end) {
  for (Thread* other = begin; other != end; ++other) {
    if (!is_barrier(other->state) || other->state != begin->state || !same(other->site, begin->site)) {
      Thread* const waiting = is_barrier(begin->state) ? begin : other;
      fail_for(*waiting, "a barrier that not all threads reach", waiting == begin ? *other : *begin);
      return false;
    }
  }
  return true;
}

bool shuffles_for_ever(Thread* begin, Thread* end) {
  Thread* const shuffling = std::find_if(begin, end, [](const Thread& t) { return t.state == State::in_shuffle; });
  if (shuffling == end) return false;
  Thread* const warp = begin + (shuffling - begin) / warp_lanes * warp_lanes;
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    const Thread& other = warp[lane];
    if ((shuffling->mask >> lane & 1) == 0) continue;
    if (other.state != State::in_shuffle || other.mask != shuffling->mask || !same(other.site, shuffling->site)) {
      fail_for(*shuffling, "a shuffle with an absent partner", other);
      return true;
    }
  }
  return false;
}

// All threads have paused: they have all left, or all of a block wait at one barrier, or all of the cluster do, or some
// wait for ever.
bool release_barriers() {
  bool left = true, released = false;
  for (unsigned rank = 0; rank < kernel.shape.cluster; ++rank) {
    Thread* const begin = threads.data() + rank * thread_count;
    Thread* const end = begin + thread_count;
    if (has_left(rank)) continue;
    left = false;
    if (shuffles_for_ever(begin, end) || !all_wait(begin, end)) return false;
    if (begin->state != State::at_barrier) continue;
    for (Thread* thread = begin; thread != end; ++thread) make_ready(*thread);
    ++barriers[rank];
    released = true;
  }
  if (left || released) return released;
  Thread* const end = threads.data() + kernel.shape.cluster * thread_count;
  if (!all_wait(threads.data(), end)) return false;
  for (Thread* thread = threads.data(); thread != end; ++thread) make_ready(*thread);
  ++now.epoch;
  return true;
}

void run_cluster(unsigned first) {
  kernel.first = first;
  begin_cluster(kernel.shape.dynamic_shared);
  ready.clear();
  barriers.fill(0);
  for (unsigned i = 0; i < kernel.shape.cluster * thread_count; ++i) {
    threads[i].fiber.start(run_thread);
    make_ready(threads[i]);
  }
  do {
    while (!ready.empty() && error.empty()) {
      std::swap(ready[launch_random.below(ready.size())], ready.back());
      now.thread = ready.back();
      now.rank = static_cast<uint16_t>(now.thread / thread_count);
      now.barriers = barriers[now.rank];
      ready.pop_back();
      running = &threads[now.thread];
      running->fiber.resume();
      running = nullptr;
    }
  } while (error.empty() && release_barriers());
}

// The clusters in the order in which they run: all, or of a large grid the first, the last, and some.
std::vector<unsigned> choose_clusters() {
  const uint64_t count = kernel.shape.grid.x / kernel.shape.cluster;
  const uint64_t sample = settings().sample > 0 ? settings().sample : count;
  std::vector<unsigned> clusters;
  if (sample >= count) {
    clusters.resize(count);
    std::iota(clusters.begin(), clusters.end(), 0u);
  } else {
    std::set<unsigned> chosen{0u, static_cast<unsigned>(count - 1)};
    while (chosen.size() < sample) chosen.insert(static_cast<unsigned>(launch_random.below(count)));
    clusters.assign(chosen.begin(), chosen.end());
  }
  launch_random.shuffle(clusters);
  return clusters;
}

void run_blocks(uint64_t seed) {
  launch_random = Random(seed);
  begin_launch(settings().sample > 0);
  for (const unsigned cluster : choose_clusters()) {
    run_cluster(cluster * kernel.shape.cluster);
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

void check_launch(size_t parameter_bytes) {
  const auto& [grid, block, shared, cluster] = kernel.shape;
  const auto most_shared = static_cast<size_t>(device_properties(current_device()).shared_bytes);
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
  require_launch(shared <= most_shared,
                 std::to_string(shared) + " bytes of dynamic shared memory are beyond " + std::to_string(most_shared));
  require_launch(cluster > 0 && cluster <= most_ranks && grid.x % cluster == 0,
                 "a cluster of " + std::to_string(cluster) + " blocks is empty, beyond 8, or no part of the grid");
  require_launch(parameter_bytes <= most_parameter_bytes,
                 std::to_string(parameter_bytes) + " bytes of parameters are beyond 4096");
  require_launch(grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1,
                 "the emulator knows grids and blocks in x only");
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

void enter_kernel(const char* signature, int most, int) {
  if (!kernel.asked) return;
  kernel.name = short_name(signature);
  kernel.most_threads = most;
  running->fiber.pause();
}

dim3 thread_index() {
  return now.thread % thread_count;
}

dim3 block_size() {
  return kernel.shape.block;
}

dim3 block_index() {
  return kernel.first + now.rank;
}

dim3 grid_size() {
  return kernel.shape.grid;
}

unsigned cluster_size() {
  return kernel.shape.cluster;
}

unsigned block_rank() {
  return now.rank;
}

bool has_left(unsigned rank) {
  const auto begin = threads.begin() + rank * thread_count;
  return std::all_of(begin, begin + thread_count, [](const Thread& t) { return t.state == State::done; });
}

void synchronise(Site site) {
  wait(State::at_barrier, site);
}

void synchronise_cluster(Site site) {
  wait(State::at_cluster_barrier, site);
}

uint64_t shuffle_down_bits(Site site, unsigned mask, uint64_t value, unsigned lanes) {
  const unsigned own_index = now.thread % thread_count, lane = own_index % warp_lanes;
  Thread* const warp = running - lane;
  if ((mask >> lane & 1) == 0) fail("a shuffle whose mask %#x leaves out the calling lane %u", mask, lane);
  const unsigned source = lane + lanes < warp_lanes ? lane + lanes : lane;
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
    if (own_index - lane + i >= thread_count) {
      fail("a shuffle with an absent partner: the block has no thread %u", own_index - lane + i);
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

void run_grid(const Shape& shape, void (*body)(void*), void* parameters, size_t parameter_bytes) {
  kernel = Kernel{.body = body, .parameters = parameters, .shape = shape};
  thread_count = shape.block.x;
  set_parameters(parameters, parameter_bytes);
  ask_kernel();
  check_launch(parameter_bytes);
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

EMULATION_EXPORT void emulation_set(uint64_t seed, int orders, int device, int64_t sample) {
  emulation::settings() = {seed, orders, device, sample};
  emulation::launches = 0;
}

EMULATION_EXPORT const char* emulation_device_name(int index) {
  return index < emulation::device_count() ? emulation::device_properties(index).name : nullptr;
}

__attribute__((visibility("hidden"))) AOTITorchError emulation_current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
}
