// The optional residual, as a compile-time choice. Forward adds it to y. Backward subtracts it from y, and stores dy as
// its gradient.
#pragma once

#include "blocks.h"
#include "vectors.h"
#include "walk.h"

namespace inplace_abn::cpu {

// `panel` and `rows` return the residual at a part of the tensor, `at` that at an element of a panel's channel and run,
// or of a row, `row` that at a row. Indices count from there. `End` is the end of a run (vectors.h). `Block` holds up
// to `most` elements (blocks.h), and is finished by passes that store a gradient; `gradient` is what dy is known to be.
template <typename scalar_t>
struct NoResidual {
  using opmath_t = opmath_type<scalar_t>;
  struct End {
    INPLACE_ABN_INLINE void take(NoResidual, int64_t) {}
    INPLACE_ABN_INLINE NoResidual get() { return {}; }
    INPLACE_ABN_INLINE void store_gradient(NoResidual, int64_t) const {}
  };
  template <int64_t most>
  struct Block {
    INPLACE_ABN_INLINE explicit Block(NoResidual, int64_t = most) {}
    INPLACE_ABN_INLINE opmath_t add(opmath_t y, int64_t) const { return y; }
    INPLACE_ABN_INLINE opmath_t subtract(opmath_t y, int64_t) const { return y; }
    INPLACE_ABN_INLINE opmath_t gradient(opmath_t dy, int64_t) const { return dy; }
    INPLACE_ABN_INLINE void store_gradient(opmath_t, int64_t) {}
    INPLACE_ABN_INLINE void finish(int64_t = most) {}
  };

  NoResidual panel(const Panel&, int64_t) const { return {}; }
  template <typename Dy>
  void store_gradient(const Dy&, const Panel&) const {}
  NoResidual rows(int64_t, int64_t) const { return {}; }
  int64_t row_stride(const View<const scalar_t>& like) const { return like.batch_stride; }

  INPLACE_ABN_INLINE NoResidual at(int64_t, int64_t, int64_t) const { return {}; }
  INPLACE_ABN_INLINE NoResidual row(int64_t) const { return {}; }
};

template <typename scalar_t>
struct Residual {
  using opmath_t = opmath_type<scalar_t>;
  View<const scalar_t> value;
  View<scalar_t> gradient;

  class End {
   public:
    INPLACE_ABN_INLINE void take(const Residual& from, int64_t length) {
      value_.take(from.value.data, length, from.value.data[0]);
    }
    INPLACE_ABN_INLINE Residual get() { return {{value_.data(), 0, 0}, {gradient_.data(), 0, 0}}; }
    INPLACE_ABN_INLINE void store_gradient(const Residual& from, int64_t length) const {
      gradient_.store(from.gradient.data, length);
    }

   private:
    RunEnd<scalar_t> value_, gradient_;
  };
  template <int64_t most>
  class Block {
   public:
    INPLACE_ABN_INLINE explicit Block(const Residual& from, int64_t count = most)
        : value_(from.value.data, count), gradient_(from.gradient.data) {}
    INPLACE_ABN_INLINE opmath_t add(opmath_t y, int64_t i) const { return y + value_[i]; }
    INPLACE_ABN_INLINE opmath_t subtract(opmath_t y, int64_t i) const { return y - value_[i]; }
    INPLACE_ABN_INLINE opmath_t gradient(opmath_t dy, int64_t) const { return dy; }
    INPLACE_ABN_INLINE void store_gradient(opmath_t dy, int64_t i) { gradient_.set(i, dy); }
    INPLACE_ABN_INLINE void finish(int64_t count = most) { gradient_.finish(count); }

   private:
    Loaded<scalar_t, most> value_;
    Stored<scalar_t, most> gradient_;
  };

  Residual panel(const Panel& panel, int64_t channel) const {
    return {{panel.of(value, channel), value.batch_stride, value.channel_stride},
            {panel.of(gradient, channel), gradient.batch_stride, gradient.channel_stride}};
  }
  template <typename Dy>
  void store_gradient(const Dy& dy, const Panel& panel) const {
    copy_panel(dy, panel, gradient);
  }
  // The rows from `first` on, `fold` of them taken as one.
  Residual rows(int64_t first, int64_t fold) const {
    return {{value.data + first * value.batch_stride, value.batch_stride * fold, 0},
            {gradient.data + first * gradient.batch_stride, gradient.batch_stride * fold, 0}};
  }
  // The stride of residual and gradient, or -1 if they differ.
  int64_t row_stride(const View<const scalar_t>&) const {
    return gradient.data == nullptr || gradient.batch_stride == value.batch_stride ? value.batch_stride : -1;
  }

  INPLACE_ABN_INLINE Residual at(int64_t channel, int64_t run, int64_t i) const {
    return {{value.data + channel * value.channel_stride + run * value.batch_stride + i, 0, 0},
            {gradient.data + channel * gradient.channel_stride + run * gradient.batch_stride + i, 0, 0}};
  }
  INPLACE_ABN_INLINE Residual row(int64_t r) const { return at(0, r, 0); }
};

// Calls f with the functor for the residual, which may be absent. Passes that call store_gradient need `gradient`.
template <typename scalar_t, typename F>
void visit_residual(const View<const scalar_t>& value, const View<scalar_t>& gradient, const F& f) {
  if (value.data == nullptr) {
    f(NoResidual<scalar_t>{});
  } else {
    f(Residual<scalar_t>{value, gradient});
  }
}

}  // namespace inplace_abn::cpu
