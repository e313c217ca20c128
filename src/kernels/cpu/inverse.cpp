#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "inverses.h"
#include "walk.h"

namespace inplace_abn::cpu {
namespace {

template <typename Act, typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void invert_block(const Act& given, const scalar_t* z, const scalar_t* dz, int64_t count,
                                     opmath_t* y, opmath_t* dy) {
  constexpr int64_t most = 256;
  const Act act = given;
  for (int64_t done = 0; done < count; done += most) {
    const int64_t some = std::min(most, count - done);
    const Loaded<scalar_t, most> loaded(z + done, some);
    INPLACE_ABN_INDEPENDENT
    for (int64_t i = done; i < done + some; ++i) {
      opmath_t gradient = 1;
      if constexpr (!BlockInverse<scalar_t>::gives_slopes) gradient = dz[i];
      act.inverse(loaded[i - done], gradient, y[i], dy[i]);
    }
  }
}

// In 16 bits there is a table for each activation without a parameter, with an entry for each z. The entries of the z
// that occur fit the first-level cache in bfloat16, the second-level cache in float16.
struct Entry {
  float y, slope;
};

template <typename scalar_t, typename Act, bool of_rounded>
const Entry* entries() {
  static const std::vector<Entry> made = [] {
    std::vector<Entry> table(1 << 16);
    for (uint32_t i = 0; i < table.size(); ++i) {
      Act{of_rounded}.inverse(bits_to<scalar_t>(static_cast<uint16_t>(i)), 1, table[i].y, table[i].slope);
    }
    return table;
  }();
  return made.data();
}

// Written by hand, with one load for an entry and one shuffle for four: compilers load y and slope one by one.
template <typename scalar_t>
INPLACE_ABN_CLONES void look_up(const Entry* table, const scalar_t* z, int64_t count, float* y, float* slope) {
  int64_t i = 0;
#if defined(__GNUC__)
  typedef double PairOfEntries __attribute__((vector_size(16)));
  typedef float FourFloats __attribute__((vector_size(16)));
  const auto at = [&](int64_t k)
                      __attribute__((always_inline)) { return bits_to<double>(table[bits_to<uint16_t>(z[k])]); };
  INPLACE_ABN_NOT_UNROLLED
  for (const int64_t fours = count / 4 * 4; i < fours; i += 4) {
    const PairOfEntries low = {at(i), at(i + 1)}, high = {at(i + 2), at(i + 3)};
    const auto a = bits_to<FourFloats>(low), b = bits_to<FourFloats>(high);
    const FourFloats four_y = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    const FourFloats four_slopes = __builtin_shufflevector(a, b, 1, 3, 5, 7);
    memcpy(y + i, &four_y, sizeof(four_y));
    memcpy(slope + i, &four_slopes, sizeof(four_slopes));
  }
#endif
  INPLACE_ABN_NOT_UNROLLED
  for (; i < count; ++i) {
    const Entry& entry = table[bits_to<uint16_t>(z[i])];
    y[i] = entry.y;
    slope[i] = entry.slope;
  }
}

template <typename scalar_t, typename opmath_t, typename Act>
INPLACE_ABN_CLONES void invert_run(const scalar_t* z, opmath_t* y, int64_t count, Act act) {
  constexpr int64_t most = 512;
  for (int64_t done = 0; done < count; done += most) {
    const int64_t block = std::min(most, count - done);
    // dy is not wanted, so dz may be anything.
    const Inverted<scalar_t, Act, most> inverted(act, z + done, z + done, block);
    INPLACE_ABN_INDEPENDENT
    for (int64_t i = 0; i < block; ++i) {
      opmath_t dy;
      inverted.get(act, i, y[done + i], dy);
    }
  }
}

}  // namespace

template <typename scalar_t, typename Act>
BlockInverse<scalar_t> block_inverse(const Act& act) {
  using opmath_t = opmath_type<scalar_t>;
  if constexpr (sizeof(scalar_t) == 2 && requires { act.of_rounded; }) {
    const auto invert = [](const void* table, const scalar_t* z, const scalar_t*, int64_t count, float* y,
                           float* slope) { look_up(static_cast<const Entry*>(table), z, count, y, slope); };
    return {invert, act.of_rounded ? entries<scalar_t, Act, true>() : entries<scalar_t, Act, false>()};
  } else {
    const auto invert = [](const void* given, const scalar_t* z, const scalar_t* dz, int64_t count, opmath_t* y,
                           opmath_t* dy) { invert_block(*static_cast<const Act*>(given), z, dz, count, y, dy); };
    return {invert, &act};
  }
}

template <typename scalar_t>
void inverse(const InverseArgs<scalar_t>& args) {
  visit_inverse<scalar_t>(args.activation, [&](auto act) {
    torch::stable::parallel_for(0, args.count, grain_elements, [&](int64_t begin, int64_t end) {
      invert_run(args.z + begin, args.y + begin, end - begin, act);
    });
  });
}

#define INSTANTIATE(scalar_t)                                                \
  template BlockInverse<scalar_t> block_inverse(const Elu<scalar_t>&);       \
  template BlockInverse<scalar_t> block_inverse(const Hardswish<scalar_t>&); \
  template BlockInverse<scalar_t> block_inverse(const Silu<scalar_t>&);      \
  template BlockInverse<scalar_t> block_inverse(const Gelu<scalar_t>&);      \
  template BlockInverse<scalar_t> block_inverse(const GeluTanh<scalar_t>&);  \
  template BlockInverse<scalar_t> block_inverse(const Mish<scalar_t>&);      \
  template void inverse(const InverseArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
