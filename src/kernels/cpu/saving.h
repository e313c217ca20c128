// Channels whose xhat is saved beside z: forward saves xhat of x, before x is overwritten.
#pragma once

#include <atomic>
#include <vector>

#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "vectors.h"
#include "walk.h"

namespace inplace_abn::cpu {

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void standardise_run(const scalar_t* x, scalar_t* xhat, int64_t length, opmath_t mean,
                                        opmath_t inv_std) {
  INPLACE_ABN_INDEPENDENT
  for (int64_t i = 0; i < length; ++i) {
    xhat[i] = static_cast<scalar_t>((static_cast<opmath_t>(x[i]) - mean) * inv_std);
  }
}

// `count` values of places of x, side by side.
template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void standardise_places(const scalar_t* x, const int64_t* places, scalar_t* xhat, int64_t count,
                                           const opmath_t* mean, const opmath_t* inv_std) {
  constexpr int64_t most = 256;
  scalar_t taken[most];
  for (int64_t first = 0; first < count; first += most) {
    const int64_t part = std::min(most, count - first);
    for (int64_t i = 0; i < part; ++i) taken[i] = x[places[first + i]];
    const Loaded<scalar_t, most> from(taken, part);
    Stored<scalar_t, most> to(xhat + first);
    INPLACE_ABN_INDEPENDENT
    for (int64_t i = 0; i < part; ++i) to.set(i, (from[i] - mean[first + i]) * inv_std[first + i]);
    to.finish(part);
  }
}

// The channels of a row whose xhat is saved, in the order in which it is saved: side by side, from `first` on.
struct SavedOfRow {
  std::vector<int64_t> channels;
  int64_t first = 0;
  // No other object has had it.
  const int64_t id = next_id();

  template <typename scalar_t>
  SavedOfRow(const Verbatim<scalar_t>& verbatim, int64_t count) {
    int64_t last = -1;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t row = verbatim.row(c);
      if (row < 0) continue;
      first = last < 0 ? row : std::min(first, row);
      last = std::max(last, row);
    }
    channels.assign(last < 0 ? 0 : last - first + 1, -1);
    for (int64_t c = 0; c < count; ++c) {
      if (const int64_t row = verbatim.row(c); row >= 0) channels[row - first] = c;
    }
  }

  int64_t count() const { return static_cast<int64_t>(channels.size()); }

 private:
  static int64_t next_id() {
    static std::atomic<int64_t> last = 0;
    return ++last;
  }
};

// Saves xhat of parts of x, before they are overwritten. Statistics may be written until then.
template <typename scalar_t>
class SavingPlanes {
 public:
  SavingPlanes(const View<const scalar_t>& x, const Verbatim<scalar_t>& to, const ChannelVector<scalar_t>& mean,
               const ChannelVector<scalar_t>& var, const Affine<scalar_t>& affine)
      : x_(x), to_(to), mean_(mean), var_(var), affine_(affine) {}

  void save(int64_t first, int64_t channels, const Panel& panel) const {
    if (!to_) return;
    for (int64_t c = first; c < first + channels; ++c) {
      const int64_t row = to_.row(c);
      if (row < 0) continue;
      const View<const scalar_t> from = panel.view(x_, c);
      const View<scalar_t> xhat = panel.view(to_.xhat, row);
      for (int64_t r = 0; r < panel.runs; ++r) {
        standardise_run(from.data + r * from.batch_stride, xhat.data + r * xhat.batch_stride, panel.length,
                        mean_.load(c), affine_.inv_std(var_.load(c)));
      }
    }
  }

 private:
  View<const scalar_t> x_;
  Verbatim<scalar_t> to_;
  ChannelVector<scalar_t> mean_, var_;
  Affine<scalar_t> affine_;
};

// The same for rows of channels, of which `fold` lie side by side.
template <typename scalar_t>
class SavingRows {
 public:
  using opmath_t = opmath_type<scalar_t>;

  SavingRows(const View<const scalar_t>& x, const Verbatim<scalar_t>& to, const ChannelVector<scalar_t>& mean,
             const ChannelVector<scalar_t>& var, const Affine<scalar_t>& affine, int64_t channels, int64_t fold)
      : x_(x), to_(to.xhat) {
    if (!to) return;
    const SavedOfRow saved(to, channels);
    count_ = saved.count();
    to_.data += saved.first;
    if (count_ == 0) return;
    at_once_ = fold * std::clamp<int64_t>(enough / (fold * count_), 1, rows_ahead);
    const int64_t unit = to_.batch_stride == count_ ? at_once_ : 1;
    for (int64_t r = 0; r < unit; ++r) {
      for (const int64_t channel : saved.channels) {
        const int64_t c = std::max<int64_t>(0, channel);
        places_.push_back(r * x.batch_stride + c);
        mean_.push_back(mean.load(c));
        inv_std_.push_back(affine.inv_std(var.load(c)));
      }
    }
  }

  // Called with each row. Saves the rows from there on that it saves at once, if it is time, and none after `end`.
  INPLACE_ABN_INLINE void save(int64_t row, int64_t begin, int64_t end) const {
    if (count_ > 0 && (row - begin) % at_once_ == 0) save_some(row, std::min(row + at_once_, end));
  }

 private:
  // So few that they have been prefetched, and so many values that a call does not matter.
  static constexpr int64_t rows_ahead = 8, enough = 256;

  void save_some(int64_t begin, int64_t end) const {
    const auto unit = static_cast<int64_t>(places_.size()) / count_;
    for (int64_t r = begin; r < end; r += unit) {
      standardise_places(x_.data + r * x_.batch_stride, places_.data(), to_.data + r * to_.batch_stride,
                         std::min(unit, end - r) * count_, mean_.data(), inv_std_.data());
    }
  }

  View<const scalar_t> x_;
  View<scalar_t> to_;
  int64_t count_ = 0, at_once_ = 1;
  std::vector<int64_t> places_;
  std::vector<opmath_t> mean_, inv_std_;
};

}  // namespace inplace_abn::cpu
