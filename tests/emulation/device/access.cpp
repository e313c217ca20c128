#include "access.h"

#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>

#include "cell.h"
#include "grid.h"
#include "random.h"

namespace emulation {
namespace {

// Elements of larger areas, which are views of memory that is not there, are known by their place only.
constexpr int64_t most_cells = int64_t{1} << 24;
constexpr int64_t nowhere = -1;

struct KnownArea : Area {
  const char *begin, *end;
  std::vector<Cell> cells;

  explicit KnownArea(const Area& area) : Area(area) {
    // Sorted by stride, each stepping over all that the smaller ones reach; else one that reaches over everything.
    std::erase_if(dims, [](const Dim& d) { return d.count == 1 || d.stride == 0; });
    std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
    int64_t reach = 1;
    bool nested = true;
    for (auto d = dims.rbegin(); d != dims.rend(); ++d) {
      nested = nested && d->stride >= reach;
      reach += (d->count - 1) * d->stride;
    }
    if (!nested) dims = {{reach, 1}};
    begin = static_cast<const char*>(data);
    end = begin + reach * element_bytes;
    if (count() <= most_cells) cells.resize(count());
    for (Cell& cell : cells) cell.set_written(!fresh);
  }

  int64_t count() const {
    int64_t product = 1;
    for (const Dim& d : dims) product *= d.count;
    return product;
  }

  bool reaches(const char* address) const { return address >= begin && address < end; }

  // The index of the element that has this byte, if one has.
  int64_t find(const char* address) const {
    if (!reaches(address)) return nowhere;
    int64_t rest = (address - begin) / element_bytes, index = 0;
    for (const Dim& d : dims) {
      const int64_t step = rest / d.stride;
      if (step >= d.count) return nowhere;
      rest -= step * d.stride;
      index = index * d.count + step;
    }
    return rest == 0 ? index : nowhere;
  }

  // Calls f(address, index of the first, number of elements) for runs of neighbours.
  template <typename F>
  void for_each_run(const F& f) const {
    const bool dense = !dims.empty() && dims.back().stride == 1;
    const int64_t run = dense ? dims.back().count : 1, runs = count() / run;
    for (int64_t i = 0; i < runs; ++i) {
      int64_t rest = i, offset = 0;
      for (auto d = dims.rbegin() + (dense ? 1 : 0); d != dims.rend(); ++d) {
        offset += rest % d->count * d->stride;
        rest /= d->count;
      }
      f(const_cast<char*>(begin) + offset * element_bytes, i * run, run);
    }
  }

  bool is_same(const KnownArea& other) const {
    return begin == other.begin && element_bytes == other.element_bytes &&
           std::equal(dims.begin(), dims.end(), other.dims.begin(), other.dims.end(),
                      [](const Dim& a, const Dim& b) { return a.count == b.count && a.stride == b.stride; });
  }
};

struct Held {
  AtenTensorHandle tensor;
};

std::deque<KnownArea> areas;
std::vector<Held> scratch;
const char *parameters_begin = nullptr, *parameters_end = nullptr;
uint32_t first_block = 1, blocks = 0;
bool is_sampled = false;

struct SharedVariable {
  const void* key;
  size_t offset;
};

alignas(128) std::array<char, shared_limit> shared_memory;
std::array<Cell, shared_limit> shared_cells;
std::vector<SharedVariable> shared_variables;
size_t shared_bytes = 0;

// Half of the words anything, half NaN in every type of floating point, of which no two are alike.
void poison(char* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(uint32_t)) {
    const uint64_t bits = launch_random.next();
    const auto word = static_cast<uint32_t>((bits >> 32 & 1) != 0 ? bits | 0xfff80000 : bits);
    std::memcpy(memory + i, &word, std::min(sizeof(word), bytes - i));
  }
}

const char* verb(bool writes) {
  return writes ? "writes" : "reads";
}

// Accesses before block `since` are of no concern: an earlier launch's, or in other shared memory.
void touch(Cell& cell, bool writes, uint32_t since, const char* name, int64_t index) {
  if (const Moment* other = cell.race(writes, since)) {
    const bool here = other->block == now.block;
    const std::string thread = "thread " + std::to_string(other->thread);
    const char* const who = !here ? "another block" : other->thread == 0xffff ? "another thread" : thread.c_str();
    fail("a race: it %s element %ld of %s, as %s does with no barrier between", verb(writes), long{index}, name, who);
  }
  cell.note(writes, since);
}

void check_shared(const char* address, size_t bytes, bool writes) {
  const size_t offset = address - shared_memory.data();
  if (offset + bytes > shared_bytes) fail("%s %zu bytes behind shared memory", verb(writes), bytes);
  for (size_t i = offset; i < offset + bytes; ++i) {
    touch(shared_cells[i], writes, now.block, "shared memory", static_cast<int64_t>(i));
  }
}

bool in_constants(const void* address) {
  struct Search {
    uintptr_t address;
    bool found;
  } search{reinterpret_cast<uintptr_t>(address), false};
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    auto& wanted = *static_cast<Search*>(data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& segment = info->dlpi_phdr[i];
      const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
      const bool inside = wanted.address >= begin && wanted.address < begin + segment.p_memsz;
      if (inside && segment.p_type == PT_LOAD && (segment.p_flags & PF_W) == 0) wanted.found = true;
    }
    return wanted.found ? 1 : 0;
  };
  dl_iterate_phdr(visit, &search);
  return search.found;
}

[[noreturn]] void fail_outside(const char* address, size_t bytes, bool writes) {
  const KnownArea* nearest = nullptr;
  int64_t least = 0;
  for (const KnownArea& area : areas) {
    const int64_t distance = address < area.begin ? area.begin - address : std::max<int64_t>(0, address - area.end);
    if (nearest == nullptr || distance < least) nearest = &area, least = distance;
  }
  if (nearest == nullptr) fail("%s %zu bytes, but no tensor was passed", verb(writes), bytes);
  const char* where = nearest->reaches(address)  ? "between the elements of"
                      : address < nearest->begin ? "before the first element of"
                                                 : "behind the last element of";
  const int64_t distance = address < nearest->begin ? nearest->begin - address : address - nearest->end;
  if (nearest->reaches(address)) {
    fail("%s %zu bytes %s %s", verb(writes), bytes, where, nearest->name.c_str());
  }
  fail("%s %zu bytes, %ld bytes %s %s", verb(writes), bytes, long{distance}, where, nearest->name.c_str());
}

// The bytes from `address` that lie in one element; fails if they lie in none that may be accessed so.
size_t check_element(const char* address, size_t bytes, bool writes) {
  const unsigned use = writes ? use_write : use_read;
  const KnownArea* refused = nullptr;
  for (KnownArea& area : areas) {
    const int64_t index = area.find(address);
    if (index == nowhere) continue;
    if ((area.uses & use) == 0) {
      refused = &area;
      continue;
    }
    const size_t left = area.element_bytes - (address - area.begin) % area.element_bytes;
    if (!area.cells.empty()) {
      Cell& cell = area.cells[index];
      if (!writes && !cell.written() && !is_sampled) {
        fail("reads element %ld of %s before anything was written to it", long{index}, area.name.c_str());
      }
      touch(cell, writes, first_block, area.name.c_str(), index);
    }
    return std::min(left, bytes);
  }
  if (refused != nullptr) fail("%s %s, which it must not", verb(writes), refused->name.c_str());
  fail_outside(address, bytes, writes);
}

}  // namespace

void begin_call() {
  areas.clear();
}

void add_area(const Area& area) {
  if (area.data == nullptr) return;
  for (const Dim& d : area.dims) {
    if (d.count == 0) return;
  }
  const KnownArea known(area);
  for (KnownArea& other : areas) {
    if (!other.is_same(known)) continue;
    other.uses |= area.uses;
    other.name += " and " + area.name;
    return;
  }
  areas.push_back(known);
}

void end_call() {
  areas.clear();
  for (const Held& held : scratch) aoti_torch_delete_tensor_object(held.tensor);
  scratch.clear();
}

void set_parameters(const void* data, size_t bytes) {
  parameters_begin = static_cast<const char*>(data);
  parameters_end = parameters_begin + bytes;
}

void require_aligned(const void* address, size_t bytes) {
  if (!in_kernel() || on_stack(address)) return;
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    fail("a misaligned access: %zu bytes, %zu past a multiple of them", bytes,
         static_cast<size_t>(reinterpret_cast<uintptr_t>(address) % bytes));
  }
}

void check_access(const void* data, size_t bytes, bool writes) {
  if (!in_kernel() || on_stack(data)) return;
  const auto* address = static_cast<const char*>(data);
  if (address >= shared_memory.data() && address < shared_memory.data() + shared_limit) {
    return check_shared(address, bytes, writes);
  }
  if (!writes && address >= parameters_begin && address + bytes <= parameters_end) return;
  const bool known = std::any_of(areas.begin(), areas.end(), [&](const KnownArea& a) { return a.reaches(address); });
  if (!known && !writes && in_constants(address)) return;
  while (bytes > 0) {
    const size_t checked = check_element(address, bytes, writes);
    address += checked;
    bytes -= checked;
  }
}

void begin_launch(bool sampled) {
  is_sampled = sampled;
  first_block = blocks + 1;
}

void begin_block() {
  now = {++blocks, 0, 0};
  shared_variables.clear();
  shared_bytes = 0;
}

void count_barrier() {
  ++now.barriers;
}

void* shared_variable(const void* key, size_t bytes, size_t alignment) {
  for (const SharedVariable& variable : shared_variables) {
    if (variable.key == key) return shared_memory.data() + variable.offset;
  }
  const size_t offset = (shared_bytes + alignment - 1) / alignment * alignment;
  if (offset + bytes > shared_limit) {
    fail("%zu bytes of static shared memory are beyond 48 KB", offset + bytes);
  }
  poison(shared_memory.data() + offset, bytes);
  shared_variables.push_back({key, offset});
  shared_bytes = offset + bytes;
  return shared_memory.data() + offset;
}

struct Snapshot::Saved {
  KnownArea* area;
  std::vector<char> bytes;
  std::vector<bool> written;
};

Snapshot::Snapshot() {
  for (KnownArea& area : areas) {
    if ((area.uses & use_write) == 0 || area.cells.empty()) continue;
    Saved saved{&area, std::vector<char>(area.count() * area.element_bytes), {}};
    area.for_each_run([&](const char* from, int64_t first, int64_t count) {
      std::memcpy(saved.bytes.data() + first * area.element_bytes, from, count * area.element_bytes);
    });
    for (const Cell& cell : area.cells) saved.written.push_back(cell.written());
    saved_.push_back(std::move(saved));
  }
}

Snapshot::~Snapshot() = default;

void Snapshot::restore() const {
  for (const Saved& saved : saved_) {
    const int64_t size = saved.area->element_bytes;
    saved.area->for_each_run([&](char* to, int64_t first, int64_t count) {
      std::memcpy(to, saved.bytes.data() + first * size, count * size);
    });
    for (size_t i = 0; i < saved.written.size(); ++i) saved.area->cells[i].set_written(saved.written[i]);
  }
}

std::string Snapshot::difference() const {
  std::string found;
  for (const Saved& saved : saved_) {
    const int64_t size = saved.area->element_bytes;
    saved.area->for_each_run([&](const char* now_there, int64_t first, int64_t count) {
      for (int64_t i = 0; i < count && found.empty(); ++i) {
        if (std::memcmp(now_there + i * size, saved.bytes.data() + (first + i) * size, size) != 0) {
          found = "element " + std::to_string(first + i) + " of " + saved.area->name;
        }
      }
    });
  }
  return found;
}

AOTITorchError allocate_scratch(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t,
                                int32_t, AtenTensorHandle* result) {
  constexpr int64_t granule = 4;
  const AOTITorchError status =
      aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, result);
  if (status != 0) return status;
  void* data = nullptr;
  aoti_torch_get_data_ptr(*result, &data);
  // Kept until the end of the call, lest the next scratch memory lie where this one did.
  Held held{};
  aoti_torch_new_tensor_handle(*result, &held.tensor);
  scratch.push_back(held);
  const std::string name = "scratch memory " + std::to_string(scratch.size());
  if (settings().sample > 0) {
    // What blocks that do not run would have left in it counts for nothing.
    std::memset(data, 0, sizes[0]);
  } else {
    poison(static_cast<char*>(data), sizes[0]);
  }
  add_area({name, data, granule, {{sizes[0] / granule, 1}}, use_both, true});
  return 0;
}

}  // namespace emulation
