// Channels whose xhat is saved beside z (saving.h): backward takes it instead of what z says.
#pragma once

#include <bit>
#include <vector>

#include "blocks.h"
#include "inplace_abn/curves.h"
#include "inplace_abn/kernels.h"
#include "residual.h"
#include "saving.h"
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

// Calls f(first, channels, is_saved) for parts of a group of channels: those that are not saved together, saved ones
// one by one. Places count from the group's first channel.
template <typename scalar_t, typename F>
void for_each_part(const Verbatim<const scalar_t>& verbatim, int64_t group, int64_t channels, const F& f) {
  for (int64_t first = 0, count = 1; first < channels; first += count, count = 1) {
    const bool is_saved = verbatim.row(group + first) >= 0;
    while (!is_saved && first + count < channels && verbatim.row(group + first + count) < 0) ++count;
    f(first, count, is_saved);
  }
}

// dy from z and dz, for activations that are not curved.
template <typename scalar_t>
void gradient_of_run(const ActivationArgs& activation, const scalar_t* z, const scalar_t* dz, opmath_type<scalar_t>* dy,
                     int64_t count);

// Panels of channels whose xhat is saved. Their z is not inverted.
template <typename scalar_t>
class SavedPlanes {
 public:
  template <typename Args>
  explicit SavedPlanes(const Args& args)
      : z_(args.z), dz_(args.dz), activation_(args.activation), verbatim_(args.verbatim) {}

  const Verbatim<const scalar_t>& verbatim() const { return verbatim_; }
  View<const scalar_t> xhat(const Panel& panel, int64_t c) const {
    return panel.view(verbatim_.xhat, verbatim_.row(c));
  }
  // Calls f with dy, of x's type or wider.
  template <typename F>
  void visit_dy(const Panel& panel, int64_t c, const F& f) const {
    if (verbatim_.dy.data != nullptr) return f(panel.view(verbatim_.dy, verbatim_.row(c)));
    using opmath_t = opmath_type<scalar_t>;
    thread_local std::vector<opmath_t> memory;
    memory.resize(panel.runs * panel.length);
    const View<const scalar_t> z = panel.view(z_, c), dz = panel.view(dz_, c);
    for (int64_t r = 0; r < panel.runs; ++r) {
      gradient_of_run(activation_, z.data + r * z.batch_stride, dz.data + r * dz.batch_stride,
                      memory.data() + r * panel.length, panel.length);
    }
    f(View<const opmath_t>{memory.data(), panel.length, 0});
  }

 private:
  View<const scalar_t> z_, dz_;
  ActivationArgs activation_;
  Verbatim<const scalar_t> verbatim_;
};

// Puts values that are side by side where they belong in rows of all channels.
template <typename opmath_t>
class Spread {
 public:
  static constexpr int64_t lanes = 32 / sizeof(opmath_t);

  // `from` has for each place of a row the number of its value, or -1.
  void set(std::vector<int64_t> from) {
    windows_.clear();
    are_near_ = true;
    reach_ = 0;
    for (int64_t begin = 0; begin < static_cast<int64_t>(from.size()); begin += lanes) {
      const int64_t end = std::min<int64_t>(static_cast<int64_t>(from.size()), begin + lanes);
      int64_t least = -1;
      for (int64_t i = begin; i < end; ++i) {
        if (from[i] >= 0) least = least < 0 ? from[i] : std::min(least, from[i]);
      }
      if (least < 0) continue;
      Window window{begin, least, {}};
      for (int64_t i = begin; i < end; ++i) {
        if (from[i] >= 0) window.lanes[i - begin] = static_cast<Lane>(from[i] - least);
        are_near_ = are_near_ && window.lanes[i - begin] < lanes;
      }
      windows_.push_back(window);
      reach_ = std::max(reach_, least + lanes);
    }
    from_ = std::move(from);
  }

  // Reads up to a vector more than the values. Writes whole vectors, which are read back at once.
  template <typename scalar_t>
  INPLACE_ABN_INLINE void apply(const scalar_t* values, opmath_t* row) const {
#if defined(__GNUC__) && !defined(__clang__)
    if (are_near_) {
      const Window* const end = windows_.data() + windows_.size();
      for (const Window* window = windows_.data(); window != end; ++window) {
        Lanes taken;
        memcpy(&taken, window->lanes, sizeof(taken));
        Vector vector;
        load(values + window->value, vector);
        vector = __builtin_shuffle(vector, taken);
        memcpy(row + window->place, &vector, sizeof(vector));
      }
      return;
    }
#endif
    apply_one_by_one(values, row);
  }

  // How far `apply` may read.
  int64_t reach() const { return reach_; }

  template <typename scalar_t>
  INPLACE_ABN_INLINE void apply_one_by_one(const scalar_t* values, opmath_t* row) const {
    for (size_t i = 0; i < from_.size(); ++i) {
      if (from_[i] >= 0) row[i] = static_cast<opmath_t>(values[from_[i]]);
    }
  }

 private:
  using Lane = typename Tag<opmath_t>::mask_t;
  // The values of the places from `place` on lie among those from `value` on.
  struct Window {
    int64_t place, value;
    Lane lanes[Spread::lanes];
  };
#if defined(__GNUC__) && !defined(__clang__)
  typedef opmath_t Vector __attribute__((vector_size(32)));
  typedef Lane Lanes __attribute__((vector_size(32)));

  INPLACE_ABN_INLINE static void load(const opmath_t* values, Vector& to) { memcpy(&to, values, sizeof(to)); }
  INPLACE_ABN_INLINE static void load(const c10::BFloat16* values, Vector& to) {
    typedef uint16_t Narrow __attribute__((vector_size(16)));
    typedef uint32_t Wide __attribute__((vector_size(32)));
    Narrow narrow;
    memcpy(&narrow, values, sizeof(narrow));
    const Wide wide = __builtin_convertvector(narrow, Wide) << 16;
    memcpy(&to, &wide, sizeof(to));
  }
#endif

  std::vector<int64_t> from_;
  std::vector<Window> windows_;
  bool are_near_ = true;
  int64_t reach_ = 0;
};

// Rows of values at this distance, spread. `elements` can be read.
template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void spread_rows(const scalar_t* from, int64_t stride, int64_t rows, int64_t elements,
                                    const Spread<opmath_t>& spread, opmath_t* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    if (r * stride + spread.reach() <= elements) {
      spread.apply(from + r * stride, to + r * to_stride);
    } else {
      spread.apply_one_by_one(from + r * stride, to + r * to_stride);
    }
  }
}

// Rows of this thread in which what was saved is at its place, and whether a place has something saved.
template <typename opmath_t>
struct SpreadRows {
  using mask_t = typename Tag<opmath_t>::mask_t;
  Spread<opmath_t> of_xhat, of_dy;
  int64_t id = 0, fold = 0, at_once, stride;
  std::vector<opmath_t> xhat, dy, widened;
  std::vector<mask_t> is_saved;

  void set(const SavedOfRow& saved, int64_t xhat_stride, int64_t dy_stride, int64_t channels, int64_t fold_) {
    if (id == saved.id && fold == fold_) return;
    id = saved.id;
    fold = fold_;
    constexpr int64_t enough = 2048, lanes = Spread<opmath_t>::lanes;
    stride = (channels * fold + lanes - 1) / lanes * lanes;
    at_once = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(1, enough / stride))));
    is_saved.assign(stride, 0);
    for (const auto& [spread, saved_stride] : {std::pair{&of_xhat, xhat_stride}, std::pair{&of_dy, dy_stride}}) {
      std::vector<int64_t> from(channels * fold, -1);
      for (int64_t f = 0; f < fold; ++f) {
        for (int64_t i = 0; i < saved.count(); ++i) {
          if (saved.channels[i] < 0) continue;
          from[f * channels + saved.channels[i]] = f * saved_stride + i;
          is_saved[f * channels + saved.channels[i]] = -1;
        }
      }
      spread->set(std::move(from));
    }
    xhat.resize(at_once * stride);
    dy.resize(at_once * stride);
  }
};

// A functor of the residual (residual.h) for rows. `subtract` gives a saved xhat where there is one, and `gradient` the
// dy of such a channel if `with_dy`.
template <typename scalar_t, typename Res, bool with_dy>
struct RowVerbatim {
  using opmath_t = opmath_type<scalar_t>;
  Res residual;
  View<const scalar_t> saved_xhat, saved_dy;
  const SavedOfRow* saved;
  int64_t batch, channels, fold = 1;
  SpreadRows<opmath_t>* spread = nullptr;
  const opmath_t *xhat = nullptr, *dy = nullptr;
  const typename Tag<opmath_t>::mask_t* is_saved = nullptr;

  template <int64_t most>
  class Block {
   public:
    INPLACE_ABN_INLINE explicit Block(const RowVerbatim& from, int64_t count = most)
        : residual_(from.residual, count), xhat_(from.xhat), dy_(from.dy), is_saved_(from.is_saved) {}
    INPLACE_ABN_INLINE opmath_t subtract(opmath_t y, int64_t i) const {
      const opmath_t recovered = residual_.subtract(y, i), kept = xhat_[i];
      return is_saved_[i] != 0 ? kept : recovered;
    }
    INPLACE_ABN_INLINE opmath_t gradient(opmath_t dy, int64_t i) const {
      if constexpr (!with_dy) return dy;
      const opmath_t kept = dy_[i];
      return is_saved_[i] != 0 ? kept : dy;
    }
    INPLACE_ABN_INLINE void store_gradient(opmath_t dy, int64_t i) { residual_.store_gradient(dy, i); }
    INPLACE_ABN_INLINE void finish(int64_t count = most) { residual_.finish(count); }

   private:
    typename Res::template Block<most> residual_;
    const opmath_t *xhat_, *dy_;
    const typename Tag<opmath_t>::mask_t* is_saved_;
  };

  RowVerbatim(const Res& of, const Verbatim<const scalar_t>& verbatim, const SavedOfRow& row, const Extent& extent)
      : residual(of),
        saved_xhat(verbatim.xhat),
        saved_dy(verbatim.dy),
        saved(&row),
        batch(extent.batch),
        channels(extent.channels) {
    saved_xhat.data += row.first;
    if (with_dy) saved_dy.data += row.first;
  }

  // Valid until this thread asks for other rows.
  RowVerbatim rows(int64_t first, int64_t fold_) const {
    thread_local SpreadRows<opmath_t> memory;
    memory.set(*saved, saved_xhat.batch_stride, saved_dy.batch_stride, channels, fold_);
    RowVerbatim result = *this;
    result.residual = residual.rows(first, fold_);
    result.saved_xhat.data += first * saved_xhat.batch_stride;
    if (with_dy) result.saved_dy.data += first * saved_dy.batch_stride;
    result.batch = batch - first;
    result.fold = fold_;
    result.spread = &memory;
    return result;
  }
  int64_t row_stride(const View<const scalar_t>& like) const { return residual.row_stride(like); }

  // A part of a row, from channel `i` on.
  INPLACE_ABN_INLINE RowVerbatim at(int64_t, int64_t, int64_t i) const {
    RowVerbatim result = *this;
    result.residual = residual.at(0, 0, i);
    result.xhat += i;
    result.dy += i;
    result.is_saved += i;
    return result;
  }
  // Rows must be asked for one after the other.
  INPLACE_ABN_INLINE RowVerbatim row(int64_t r) const {
    const int64_t place = r & (spread->at_once - 1);
    if (place == 0) {
      put(saved_xhat, r, spread->of_xhat, spread->xhat);
      if constexpr (with_dy) put(saved_dy, r, spread->of_dy, spread->dy);
    }
    RowVerbatim result = *this;
    result.residual = residual.row(r);
    result.xhat = spread->xhat.data() + place * spread->stride;
    result.dy = spread->dy.data() + place * spread->stride;
    result.is_saved = spread->is_saved.data();
    return result;
  }

 private:
  INPLACE_ABN_INLINE void put(const View<const scalar_t>& view, int64_t r, const Spread<opmath_t>& of,
                              std::vector<opmath_t>& to) const {
    const int64_t count = saved->count(), stride = fold * view.batch_stride;
    if (count == 0) return;
    const int64_t rows = std::min(spread->at_once, batch / fold - r);
    const scalar_t* const from = view.data + r * stride;
    if constexpr (std::is_same_v<scalar_t, c10::Half>) {
      // Rows may lie at any distance, or be one.
      const int64_t span = (rows * fold - 1) * view.batch_stride + count;
      spread->widened.resize(span + Spread<opmath_t>::lanes);
      widen(from, spread->widened.data(), span);
      spread_rows(spread->widened.data(), stride, rows, span + Spread<opmath_t>::lanes, of, to.data(), spread->stride);
    } else {
      const int64_t elements = (batch - r * fold - 1) * view.batch_stride + count;
      spread_rows(from, stride, rows, elements, of, to.data(), spread->stride);
    }
  }
};

}  // namespace inplace_abn::cpu
