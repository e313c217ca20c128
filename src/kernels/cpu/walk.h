// How the CPU kernels walk a tensor. Every op has the shape "reduce each channel, finish each channel, apply to each
// element"; the work is cut into pieces whose number depends on the tensor's extent alone, so that results do not
// depend on the number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "inplace_abn/layout.h"
#include "inplace_abn/math.h"

// One build holds the hot loops for several instruction sets; the loader picks by the features of the machine it runs
// on (the names of processors, such as arch=haswell, would pick by vendor and model). GCC knows the levels from
// release 12.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define INPLACE_ABN_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), noinline))
#else
#define INPLACE_ABN_CLONES
#endif

// Iterations are independent: outputs alias inputs element for element or not at all (kernels.h). A loop over one
// vector must not be unrolled before it is vectorised, lest this be forgotten.
#if defined(__clang__)
#define INPLACE_ABN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define INPLACE_ABN_NOT_UNROLLED _Pragma("clang loop unroll(disable)")
#define INPLACE_ABN_ONE_VECTOR _Pragma("clang loop vectorize(assume_safety) unroll(disable)")
#else
#define INPLACE_ABN_INDEPENDENT _Pragma("GCC ivdep")
#define INPLACE_ABN_NOT_UNROLLED _Pragma("GCC unroll 1")
#define INPLACE_ABN_ONE_VECTOR INPLACE_ABN_INDEPENDENT INPLACE_ABN_NOT_UNROLLED
#endif

namespace inplace_abn::cpu {

// Elements of a channel that are reduced at a time, their sums in the precision of x.
constexpr int64_t panel_elements = 4096;
// Channels from which on a channel is one task; with fewer, a channel is cut into parts.
constexpr int64_t min_tasks = 16;
// Elements below which a task is not worth a thread.
constexpr int64_t grain_elements = 16 * 1024;

// Prefetches `count` elements. Hardware follows one long stream well, but not several at a time, short ones, or one
// that is interrupted by reads of per-channel values. The target is the second-level cache, because it can wait for
// more misses at a time than the first.
template <typename scalar_t>
INPLACE_ABN_INLINE void prefetch(const scalar_t* p, int64_t count) {
#if defined(__GNUC__)
  constexpr int64_t line = 64 / sizeof(scalar_t);
  constexpr int to_write = 0, level = 2;
  for (int64_t i = 0; i < count; i += line) __builtin_prefetch(p + i, to_write, level);
#endif
}

constexpr int64_t page_bytes = 4096;

// The number of channels that are walked together, run by run. Of short planes it is as many as lie on two pages, so
// that memory is read in longer pieces; fewer if they would not stay in cache or leave too few tasks.
constexpr int64_t max_group = 16;
constexpr int64_t group_run_bytes = 2 * page_bytes;
constexpr int64_t group_bytes = 256 * 1024;

inline int64_t channels_per_group(const Extent& extent, int64_t element_size) {
  const int64_t plane = std::max<int64_t>(1, extent.space * element_size);
  const int64_t in_cache = group_bytes / (plane * std::max<int64_t>(1, extent.batch));
  const int64_t most = std::min({group_run_bytes / plane, in_cache, extent.channels / min_tasks, max_group});
  return std::max<int64_t>(1, most);
}

// What to prefetch while run `r` of a channel is walked: the channel's next run; after the last run, the first run of
// the channel `next` elements further on; a page ahead if there is a single, long run.
template <typename scalar_t>
INPLACE_ABN_INLINE const scalar_t* ahead_of_run(const scalar_t* panel, int64_t stride, int64_t runs, int64_t next,
                                                int64_t r) {
  if (runs == 1) return panel + page_bytes / sizeof(scalar_t);
  return r + 1 < runs ? panel + (r + 1) * stride : panel + next;
}

inline int64_t grain(int64_t elements_per_task) {
  return std::max<int64_t>(1, grain_elements / std::max<int64_t>(1, elements_per_task));
}

// A panel is a set of `runs` contiguous runs of `length` elements of one channel.
struct Panel {
  int64_t batch, space, runs, length;

  template <typename scalar_t>
  scalar_t* of(const View<scalar_t>& view, int64_t channel) const {
    return view.data + batch * view.batch_stride + channel * view.channel_stride + space;
  }
  template <typename scalar_t>
  View<scalar_t> view(const View<scalar_t>& whole, int64_t channel) const {
    return {of(whole, channel), whole.batch_stride, whole.channel_stride};
  }
};

// Of a panel's channel.
template <typename From, typename To>
void copy_panel(const View<const From>& from, const Panel& panel, const View<To>& to) {
  for (int64_t r = 0; r < panel.runs; ++r) {
    const From* const run = from.data + r * from.batch_stride;
    std::transform(run, run + panel.length, to.data + r * to.batch_stride, [](From v) { return static_cast<To>(v); });
  }
}

// The panels of one channel of a plane-ordered tensor, and their division into parts.
class PanelGrid {
 public:
  explicit PanelGrid(const Extent& extent) : extent_(extent) {
    group_ = std::max<int64_t>(1, panel_elements / std::max<int64_t>(1, extent.space));
    per_plane_ = (extent.space + panel_elements - 1) / panel_elements;
    panels_ = per_plane_ > 1 ? extent.batch * per_plane_ : (extent.batch + group_ - 1) / group_;
    const int64_t wanted = (min_tasks + extent.channels - 1) / std::max<int64_t>(1, extent.channels);
    parts_ = std::max<int64_t>(1, std::min(panels_, wanted));
  }

  int64_t parts() const { return parts_; }

  template <typename F>
  void for_each(int64_t part, const F& f) const {
    for (int64_t i = part * panels_ / parts_; i < (part + 1) * panels_ / parts_; ++i) {
      if (per_plane_ > 1) {
        const int64_t space = i % per_plane_ * panel_elements;
        f(Panel{i / per_plane_, space, 1, std::min(panel_elements, extent_.space - space)});
      } else {
        f(Panel{i * group_, 0, std::min(group_, extent_.batch - i * group_), extent_.space});
      }
    }
  }

 private:
  Extent extent_;
  int64_t group_, per_plane_, panels_, parts_;
};

// The partial result of passes that reduce nothing.
struct NoPartial {
  void merge(NoPartial) {}
};

// Plane order. `reduce(first_channel, channels, panel, results)` stores one Partial per channel, partials of a channel
// are merged in order, `finish(channel, partial)` returns what `apply(first_channel, channels, panel, finished)` needs
// for each. Channels that are one task are applied while they are still in cache.
template <typename Partial, typename Reduce, typename Finish, typename Apply>
void reduce_and_apply_planes(const Extent& extent, int64_t element_size, const Reduce& reduce, const Finish& finish,
                             const Apply& apply) {
  const PanelGrid grid(extent);
  const int64_t parts = grid.parts();
  const auto reduce_part = [&](int64_t first, int64_t channels, int64_t part, Partial* partials) {
    grid.for_each(part, [&](const Panel& panel) {
      Partial results[max_group];
      reduce(first, channels, panel, results);
      for (int64_t i = 0; i < channels; ++i) partials[i].merge(results[i]);
    });
  };
  using Finished = decltype(finish(0, Partial{}));
  const int64_t per_task = extent.batch * extent.space / parts;
  if (parts == 1) {
    const int64_t group = channels_per_group(extent, element_size);
    const int64_t groups = (extent.channels + group - 1) / group;
    torch::stable::parallel_for(0, groups, grain(per_task * group), [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t first = g * group, channels = std::min(group, extent.channels - first);
        Partial partials[max_group];
        Finished finished[max_group];
        reduce_part(first, channels, 0, partials);
        for (int64_t i = 0; i < channels; ++i) finished[i] = finish(first + i, partials[i]);
        grid.for_each(0, [&](const Panel& panel) { apply(first, channels, panel, finished); });
      }
    });
    return;
  }
  std::vector<Partial> partials(extent.channels * parts);
  torch::stable::parallel_for(0, extent.channels * parts, grain(per_task), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) reduce_part(i / parts, 1, i % parts, &partials[i]);
  });
  std::vector<Finished> finished;
  finished.reserve(extent.channels);
  for (int64_t c = 0; c < extent.channels; ++c) {
    for (int64_t part = 1; part < parts; ++part) partials[c * parts].merge(partials[c * parts + part]);
    finished.push_back(finish(c, partials[c * parts]));
  }
  torch::stable::parallel_for(0, extent.channels * parts, grain(per_task), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      grid.for_each(i % parts, [&](const Panel& panel) { apply(i / parts, 1, panel, &finished[i / parts]); });
    }
  });
}

}  // namespace inplace_abn::cpu
