// The inverses of activations on the CPU, by type. That of a curved one is called for a whole block, instead of
// compiled into every loop.
#pragma once

#include "inplace_abn/activation.h"
#include "inplace_abn/kernels.h"

namespace inplace_abn::cpu {

// The inverse of a curved activation, whichever it is: the y and dy of `count` z and dz. In 16 bits, where most slopes
// are read from a table, it gives the slopes instead of dy.
template <typename scalar_t>
struct BlockInverse {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr bool gives_slopes = sizeof(scalar_t) == 2;
  void (*invert)(const void* act, const scalar_t* z, const scalar_t* dz, int64_t count, opmath_t* y, opmath_t* dy);
  const void* act;
};

// That of `act`, which must outlive it.
template <typename scalar_t, typename Act>
BlockInverse<scalar_t> block_inverse(const Act& act);

// Whether an activation is curved, by the functor that inverts it. A second inversion of such takes longer than to
// store the result of the first.
template <typename Act>
constexpr bool is_curved_inverse = false;
template <typename scalar_t>
constexpr bool is_curved_inverse<BlockInverse<scalar_t>> = true;

// As visit_activation, for passes that call `inverse`.
template <typename scalar_t, typename F>
void visit_inverse(const ActivationArgs& args, const F& f) {
  visit_activation<scalar_t>(args.kind, args.param, [&](auto act) {
    if constexpr (is_curved<decltype(act)>) {
      f(block_inverse<scalar_t>(act));
    } else {
      f(act);
    }
  });
}

}  // namespace inplace_abn::cpu
