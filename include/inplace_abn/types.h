// The types of elements, and what arithmetic on them is done in.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

namespace inplace_abn {

template <typename scalar_t>
using opmath_type = std::conditional_t<sizeof(scalar_t) == 2, float, scalar_t>;

}  // namespace inplace_abn
