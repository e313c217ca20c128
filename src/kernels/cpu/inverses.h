// The functors of activations on the CPU, by type. Inverses that take long are read from a table in 16 bits. In float64
// they are called instead of compiled into every loop, because their exponentials are calls in any case.
#pragma once

#include <utility>
#include <vector>

#include "inplace_abn/activation.h"
#include "inplace_abn/kernels.h"
#include "walk.h"

namespace inplace_abn::cpu {

// A table of the inverse, with an entry for each 16-bit z. The entries of the z that occur fit the first-level cache in
// bfloat16, the second-level cache in float16.
template <typename scalar_t>
class Lookup {
 public:
  template <typename Act>
  static Lookup of() {
    static const std::vector<Entry> entries = [] {
      std::vector<Entry> made(1 << 16);
      for (uint32_t i = 0; i < made.size(); ++i) {
        Act{}.inverse(bits_to<scalar_t>(static_cast<uint16_t>(i)), 1, made[i].y, made[i].slope);
      }
      return made;
    }();
    return Lookup(entries.data());
  }

  // The y and slopes of `count` z. Written by hand, with one load for an entry and one shuffle for four: compilers load
  // y and slope one by one.
  INPLACE_ABN_INLINE void read(const scalar_t* z, int64_t count, float* y, float* slope) const {
    int64_t i = 0;
#if defined(__GNUC__)
    INPLACE_ABN_NOT_UNROLLED
    for (const int64_t fours = count / 4 * 4; i < fours; i += 4) {
      const PairOfEntries low = {at(z[i]), at(z[i + 1])}, high = {at(z[i + 2]), at(z[i + 3])};
      const auto a = bits_to<FourFloats>(low), b = bits_to<FourFloats>(high);
      const FourFloats four_y = __builtin_shufflevector(a, b, 0, 2, 4, 6);
      const FourFloats four_slopes = __builtin_shufflevector(a, b, 1, 3, 5, 7);
      memcpy(y + i, &four_y, sizeof(four_y));
      memcpy(slope + i, &four_slopes, sizeof(four_slopes));
    }
#endif
    INPLACE_ABN_NOT_UNROLLED
    for (; i < count; ++i) {
      const Entry& entry = entries_[bits_to<uint16_t>(z[i])];
      y[i] = entry.y;
      slope[i] = entry.slope;
    }
  }

 private:
  struct Entry {
    float y, slope;
  };
#if defined(__GNUC__)
  typedef double PairOfEntries __attribute__((vector_size(16)));
  typedef float FourFloats __attribute__((vector_size(16)));

  INPLACE_ABN_INLINE double at(scalar_t z) const { return bits_to<double>(entries_[bits_to<uint16_t>(z)]); }
#endif

  explicit Lookup(const Entry* entries) : entries_(entries) {}

  const Entry* entries_;
};

class Call {
 public:
  template <typename Act>
  static Call of() {
    return Call([](double y) { return Act{}.forward(y); },
                [](double z, double dz, double& y, double& dy) { Act{}.inverse(z, dz, y, dy); });
  }

  INPLACE_ABN_INLINE double forward(double y) const { return forward_(y); }
  INPLACE_ABN_INLINE void inverse(double z, double dz, double& y, double& dy) const { inverse_(z, dz, y, dy); }

 private:
  using Forward = double(double);
  using Inverse = void(double, double, double&, double&);

  Call(Forward* forward, Inverse* inverse) : forward_(forward), inverse_(inverse) {}

  Forward* forward_;
  Inverse* inverse_;
};

template <typename Act>
constexpr bool takes_long = has_minimum<Act>;
template <typename scalar_t>
constexpr bool takes_long<Hardswish<scalar_t>> = true;

// Whether a second inversion takes longer than to store the result of the first.
template <typename Act>
constexpr bool is_costly = takes_long<Act>;
template <typename scalar_t>
constexpr bool is_costly<Elu<scalar_t>> = true;
template <typename scalar_t>
constexpr bool is_costly<Lookup<scalar_t>> = true;
template <>
inline constexpr bool is_costly<Call> = true;

// Whether the activation that is inverted is curved. Tables and calls are made for such only.
template <typename Act>
constexpr bool is_curved_inverse = is_curved<Act>;
template <typename scalar_t>
constexpr bool is_curved_inverse<Lookup<scalar_t>> = true;
template <>
inline constexpr bool is_curved_inverse<Call> = true;

// As visit_activation, for passes that call `inverse`.
template <typename scalar_t, typename F>
void visit_inverse(const ActivationArgs& args, const F& f) {
  visit_activation<scalar_t>(args.kind, args.param, [&](auto act) {
    using Act = decltype(act);
    if constexpr (!takes_long<Act> || std::is_same_v<scalar_t, float>) {
      f(act);
    } else if constexpr (std::is_same_v<scalar_t, double>) {
      f(Call::of<Act>());
    } else {
      f(Lookup<scalar_t>::template of<Act>());
    }
  });
}

// As visit_forward of activation.h.
template <typename scalar_t, typename F>
void visit_forward(const ActivationArgs& args, bool invertible, const F& f) {
  inplace_abn::visit_forward<scalar_t>(args.kind, args.param, invertible, [&](auto act) {
    if constexpr (takes_long<decltype(act)> && std::is_same_v<scalar_t, double>) {
      f(Call::of<decltype(act)>());
    } else {
      f(act);
    }
  });
}

}  // namespace inplace_abn::cpu
