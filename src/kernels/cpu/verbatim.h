// Channels whose xhat is saved beside z. Forward saves xhat of x, and backward takes it instead of what z says.
#pragma once

#include <vector>

#include "blocks.h"
#include "inplace_abn/curves.h"
#include "inplace_abn/kernels.h"
#include "residual.h"
#include "vectors.h"
#include "walk.h"

namespace inplace_abn::cpu {

// What backward finds xhat by: y - beta, times the inverse of the divisor. A saved xhat is taken for y.
template <typename opmath_t>
struct ChannelValues {
  opmath_t beta, inverse_gamma;
};

template <typename scalar_t>
ChannelValues<opmath_type<scalar_t>> recovering(const Affine<scalar_t>& affine,
                                                const Verbatim<const scalar_t>& verbatim, int64_t c) {
  if (verbatim.row(c) >= 0) return {0, 1};
  return {affine.beta(c), 1 / affine.divisor(c)};
}

// --- Forward ---------------------------------------------------------------------------------------------------------

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void standardise_run(const scalar_t* x, scalar_t* xhat, int64_t length, opmath_t mean,
                                        opmath_t inv_std) {
  INPLACE_ABN_INDEPENDENT
  for (int64_t i = 0; i < length; ++i) {
    xhat[i] = static_cast<scalar_t>((static_cast<opmath_t>(x[i]) - mean) * inv_std);
  }
}

// xhat of a part of x. It must come before the part is overwritten.
template <typename scalar_t>
class XhatOf {
 public:
  using opmath_t = opmath_type<scalar_t>;

  XhatOf(const View<const scalar_t>& x, const Verbatim<scalar_t>& to, const ChannelVector<scalar_t>& mean,
         const ChannelVector<scalar_t>& var, const Affine<scalar_t>& affine, int64_t channels)
      : x_(x), to_(to.xhat), mean_(mean), var_(var), affine_(affine) {
    if (!to) return;
    rows_.resize(channels);
    for (int64_t c = 0; c < channels; ++c) {
      rows_[c] = to.row(c);
      if (rows_[c] >= 0) saved_.push_back(c);
    }
  }

  bool is_wanted() const { return !saved_.empty(); }

  void save(int64_t first, int64_t channels, const Panel& panel) const {
    if (!is_wanted()) return;
    for (int64_t c = first; c < first + channels; ++c) {
      if (rows_[c] < 0) continue;
      const View<const scalar_t> from = panel.view(x_, c);
      const View<scalar_t> xhat = panel.view(to_, rows_[c]);
      for (int64_t r = 0; r < panel.runs; ++r) {
        standardise_run(from.data + r * from.batch_stride, xhat.data + r * xhat.batch_stride, panel.length,
                        mean_.load(c), affine_.inv_std(var_.load(c)));
      }
    }
  }

  // Of `rows` rows of channels.
  void save(int64_t first, int64_t rows) const {
    for (const int64_t c : saved_) {
      const scalar_t* from = x_.data + first * x_.batch_stride + c;
      scalar_t* xhat = to_.data + first * to_.batch_stride + rows_[c];
      const opmath_t mean = mean_.load(c), inv_std = affine_.inv_std(var_.load(c));
      for (int64_t r = 0; r < rows; ++r) {
        xhat[r * to_.batch_stride] =
            static_cast<scalar_t>((static_cast<opmath_t>(from[r * x_.batch_stride]) - mean) * inv_std);
      }
    }
  }

 private:
  View<const scalar_t> x_;
  View<scalar_t> to_;
  ChannelVector<scalar_t> mean_, var_;
  Affine<scalar_t> affine_;
  std::vector<int64_t> rows_, saved_;
};

// --- Backward: functors of the residual (residual.h) whose `subtract` gives a saved xhat where there is one
// -----------

// A run of a channel whose xhat is saved, and if `with_dy` also dy.
template <typename scalar_t, typename Res, bool with_dy>
struct SavedRun {
  using opmath_t = opmath_type<scalar_t>;
  Res residual;
  const scalar_t *xhat, *dy;

  class End {
   public:
    INPLACE_ABN_INLINE void take(const SavedRun& from, int64_t length) {
      residual_.take(from.residual, length);
      xhat_.take(from.xhat, length, from.xhat[0]);
      // Spare lanes have no gradient, so they add nothing.
      if constexpr (with_dy) dy_.take(from.dy, length, scalar_t(0));
    }
    INPLACE_ABN_INLINE SavedRun get() { return {residual_.get(), xhat_.data(), dy_.data()}; }
    INPLACE_ABN_INLINE void store_gradient(const SavedRun& from, int64_t length) const {
      residual_.store_gradient(from.residual, length);
    }

   private:
    typename Res::End residual_;
    RunEnd<scalar_t> xhat_, dy_;
  };
  template <int64_t most>
  class Block {
   public:
    INPLACE_ABN_INLINE explicit Block(const SavedRun& from, int64_t count = most)
        : residual_(from.residual, count), xhat_(from.xhat, count), dy_(with_dy ? from.dy : from.xhat, count) {}
    INPLACE_ABN_INLINE opmath_t subtract(opmath_t, int64_t i) const { return xhat_[i]; }
    INPLACE_ABN_INLINE opmath_t gradient(opmath_t dy, int64_t i) const {
      if constexpr (with_dy) return dy_[i];
      return dy;
    }
    INPLACE_ABN_INLINE void store_gradient(opmath_t dy, int64_t i) { residual_.store_gradient(dy, i); }
    INPLACE_ABN_INLINE void finish(int64_t count = most) { residual_.finish(count); }

   private:
    typename Res::template Block<most> residual_;
    Loaded<scalar_t, most> xhat_, dy_;
  };

  INPLACE_ABN_INLINE SavedRun at(int64_t, int64_t, int64_t i) const {
    return {residual.at(0, 0, i), xhat + i, with_dy ? dy + i : dy};
  }
};

template <typename scalar_t, typename Res, bool with_dy>
struct PlaneVerbatim {
  static constexpr Order order = Order::planes;
  using Saved = SavedRun<scalar_t, Res, with_dy>;
  Res residual;
  Verbatim<const scalar_t> verbatim;
  Panel part{};
  int64_t first = 0;

  PlaneVerbatim panel(const Panel& panel, int64_t channel) const {
    return {residual.panel(panel, channel), verbatim, panel, channel};
  }
};

// Calls f with the functor for a run of a panel's channel, at the run's first element.
template <typename Res, typename F>
INPLACE_ABN_INLINE void visit_run(const Res& residual, int64_t channel, int64_t run, const F& f) {
  f(residual.at(channel, run, 0));
}
template <typename scalar_t, typename Res, bool with_dy, typename F>
INPLACE_ABN_INLINE void visit_run(const PlaneVerbatim<scalar_t, Res, with_dy>& known, int64_t channel, int64_t run,
                                  const F& f) {
  const Res residual = known.residual.at(channel, run, 0);
  const int64_t row = known.verbatim.row(known.first + channel);
  if (row < 0) {
    f(residual);
    return;
  }
  const auto at = [&](const auto& view) { return known.part.of(view, row) + run * view.batch_stride; };
  f(SavedRun<scalar_t, Res, with_dy>{residual, at(known.verbatim.xhat), with_dy ? at(known.verbatim.dy) : nullptr});
}

template <typename scalar_t, typename Res, bool with_dy>
struct RowVerbatim {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr Order order = Order::rows;
  Res residual;
  Verbatim<const scalar_t> verbatim;
  int64_t channels;
  // Of the rows at hand: the places of the saved values in a row, of which each of `fold` has `saved`; and rows with
  // the values of xhat and dy at their places, and whether a place has one.
  int64_t fold = 1, saved = 0;
  const int32_t* places = nullptr;
  opmath_t *xhat = nullptr, *dy = nullptr;
  const typename Tag<opmath_t>::mask_t* is_saved = nullptr;

  template <int64_t most>
  class Block {
   public:
    INPLACE_ABN_INLINE explicit Block(const RowVerbatim& from, int64_t count = most)
        : residual_(from.residual, count), xhat_(from.xhat), dy_(from.dy), is_saved_(from.is_saved) {}
    INPLACE_ABN_INLINE opmath_t subtract(opmath_t y, int64_t i) const {
      const opmath_t recovered = residual_.subtract(y, i), saved = xhat_[i];
      return is_saved_[i] != 0 ? saved : recovered;
    }
    INPLACE_ABN_INLINE opmath_t gradient(opmath_t dy, int64_t i) const {
      if constexpr (!with_dy) return dy;
      const opmath_t saved = dy_[i];
      return is_saved_[i] != 0 ? saved : dy;
    }
    INPLACE_ABN_INLINE void store_gradient(opmath_t dy, int64_t i) { residual_.store_gradient(dy, i); }
    INPLACE_ABN_INLINE void finish(int64_t count = most) { residual_.finish(count); }

   private:
    typename Res::template Block<most> residual_;
    const opmath_t *xhat_, *dy_;
    const typename Tag<opmath_t>::mask_t* is_saved_;
  };

  RowVerbatim rows(int64_t first, int64_t fold_) const {
    thread_local std::vector<int32_t> all_places;
    thread_local std::vector<opmath_t> row;
    thread_local std::vector<typename Tag<opmath_t>::mask_t> saved_in_row;
    all_places.clear();
    // Rows that no channel has go past the end.
    row.assign(2 * (channels * fold_ + 1), opmath_t(0));
    saved_in_row.assign(channels * fold_, 0);
    // Values follow each other in the order of rows.
    std::vector<int32_t> channel_of(verbatim.saved, -1);
    for (int64_t c = 0; c < channels; ++c) {
      if (const int64_t found = verbatim.row(c); found >= 0) channel_of[found] = static_cast<int32_t>(c);
    }
    for (int64_t f = 0; f < fold_; ++f) {
      for (const int32_t c : channel_of) {
        all_places.push_back(static_cast<int32_t>(c < 0 ? fold_ * channels : f * channels + c));
        if (c >= 0) saved_in_row[f * channels + c] = -1;
      }
    }
    RowVerbatim result = *this;
    result.residual = residual.rows(first, fold_);
    result.verbatim.xhat.data += first * verbatim.xhat.batch_stride;
    if (with_dy) result.verbatim.dy.data += first * verbatim.dy.batch_stride;
    result.fold = fold_;
    result.saved = verbatim.saved;
    result.places = all_places.data();
    result.xhat = row.data();
    result.dy = row.data() + channels * fold_ + 1;
    result.is_saved = saved_in_row.data();
    return result;
  }
  int64_t row_stride(const View<const scalar_t>& like) const { return residual.row_stride(like); }

  // Row `r`, whose values are put at their places; or a part of the row that was asked for last, from channel `i`.
  INPLACE_ABN_INLINE RowVerbatim at(int64_t, int64_t r, int64_t i) const {
    RowVerbatim result = *this;
    result.residual = residual.at(0, r, i);
    result.xhat += i;
    result.dy += i;
    result.is_saved += i;
    return result;
  }
  INPLACE_ABN_INLINE RowVerbatim row(int64_t r) const {
    put(verbatim.xhat, r, xhat);
    if constexpr (with_dy) put(verbatim.dy, r, dy);
    return at(0, r, 0);
  }

 private:
  INPLACE_ABN_INLINE void put(const View<const scalar_t>& view, int64_t r, opmath_t* to) const {
    const scalar_t* from = view.data + r * fold * view.batch_stride;
    const int32_t* place = places;
    for (int64_t f = 0; f < fold; ++f, from += view.batch_stride) {
      for (int64_t j = 0; j < saved; ++j, ++place) {
        to[*place] = static_cast<opmath_t>(from[j]);
      }
    }
  }
};

}  // namespace inplace_abn::cpu
