#include <torch/csrc/stable/ops.h>

#include "inplace_abn/kernels.h"
#include "inverses.h"
#include "parallel.h"

namespace inplace_abn::cpu {
namespace {

template <typename scalar_t, typename opmath_t, typename Act>
INPLACE_ABN_CLONES void invert_run(const scalar_t* z, opmath_t* y, int64_t count, Act act) {
  INPLACE_ABN_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    opmath_t dy;
    act.inverse(z[i], opmath_t(0), y[i], dy);
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
