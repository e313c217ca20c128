// Activations whose inverse takes long, as the CPU has them, and the way to an activation's functor. What the
// arithmetic of activation.h and curves.h gives is looked up in 16 bits; in float64, whose exponentials are calls in
// any case, it is called instead of compiled into every loop.
#pragma once

#include <utility>
#include <vector>

#include "inplace_abn/activation.h"

namespace inplace_abn::cpu {

// The inverse of a 16-bit z, of which there are few: those that occur fit a first-level cache, in bfloat16 all of them.
template <typename scalar_t>
class Lookup {
 public:
  using opmath_t = opmath_type<scalar_t>;

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

  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const Entry& entry = entries_[bits_to<uint16_t>(z)];
    y = entry.y;
    // Where the activation is flat it is zero whatever dz is, NaN and infinity included.
    dy = entry.slope == 0 ? opmath_t(0) : dz * entry.slope;
  }

 private:
  struct Entry {
    opmath_t y, slope;
  };

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
