#include <torch/csrc/stable/ops.h>

#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "inverses.h"
#include "walk.h"

namespace inplace_abn::cpu {
namespace {

template <typename scalar_t, typename opmath_t, typename Act>
INPLACE_ABN_CLONES void invert_run(const scalar_t* z, opmath_t* y, int64_t count, Act act) {
  constexpr int64_t most = 512;
  for (int64_t done = 0; done < count; done += most) {
    const int64_t block = std::min(most, count - done);
    const Inverted<scalar_t, Act, most> inverted(act, z + done, block);
    INPLACE_ABN_INDEPENDENT
    for (int64_t i = 0; i < block; ++i) {
      opmath_t dy;
      inverted.get(act, i, opmath_t(0), y[done + i], dy);
    }
  }
}

}  // namespace

template <typename scalar_t>
void inverse(const InverseArgs<scalar_t>& args) {
  visit_inverse<scalar_t>(args.activation, [&](auto act) {
    torch::stable::parallel_for(0, args.count, grain_elements, [&](int64_t begin, int64_t end) {
      invert_run(args.z + begin, args.y + begin, end - begin, act);
    });
  });
}

#define INSTANTIATE(scalar_t) template void inverse(const InverseArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
