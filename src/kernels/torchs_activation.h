// Divides an activation between the kernel and torch. If no backward follows and torch has an op for the activation,
// the result is to be torch's, bit for bit: the kernel computes y, and torch's op the rest.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <string_view>

#include "inplace_abn/kernels.h"
#include "inplace_abn/tensors.h"

namespace inplace_abn {

struct KernelActivation {
  KernelActivation(int64_t activation, double param, bool invertible)
      : torchs(invertible ? nullptr : torchs_own(static_cast<Activation>(activation))),
        args{torchs != nullptr ? Activation::identity : static_cast<Activation>(activation), param},
        approximate(static_cast<Activation>(activation) == Activation::gelu_tanh ? "tanh" : "none") {}

  void finish(const Tensor& x) const {
    if (torchs == nullptr) return;
    // Only torch's gelu takes a second argument.
    std::array<StableIValue, 2> stack{torch::stable::detail::from(x)};
    if (std::string_view(torchs) == "aten::gelu_") stack[1] = torch::stable::detail::from(std::string(approximate));
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(torchs, "", stack.data(), TORCH_ABI_VERSION));
    // The result is a new handle of x.
    torch::stable::detail::to<Tensor>(stack[0]);
  }

  const char* torchs;
  ActivationArgs args;
  const char* approximate;

 private:
  static const char* torchs_own(Activation activation) {
    switch (activation) {
      case Activation::silu:
        return "aten::silu_";
      case Activation::hardswish:
        return "aten::hardswish_";
      case Activation::gelu:
      case Activation::gelu_tanh:
        return "aten::gelu_";
      case Activation::mish:
        return "aten::mish_";
      default:
        return nullptr;
    }
  }
};

}  // namespace inplace_abn
