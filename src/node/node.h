// The functions of the graph node in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace inplace_abn {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// `nodes.in_cpp`. Returns an undefined tensor, and does nothing, if the call needs Python. It does not check whether
// the op that made x needs its result. xhat is saved of `saved` channels, which have a row. `name` is the layer's, for
// messages.
Tensor inplace_abn(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                   const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                   const OptTensor& momentum_tensor, double eps, int64_t scale, int64_t activation,
                   double activation_param, int64_t shared, const OptTensor& rows, int64_t saved,
                   const std::string& name);

// `nodes.attached`: z, which was written elsewhere, with the place in the graph that it has as a function of x. The
// tensor that stands for it, if there is one, gets that place, too. `name` is the layer's, for messages. Returns an
// undefined tensor, and does nothing, if the call needs Python.
Tensor attached(const Tensor& x, const Tensor& z, const OptTensor& weight, const OptTensor& bias,
                const OptTensor& residual, const OptTensor& weight_value, const OptTensor& bias_value,
                const Tensor& var, const OptTensor& rows, const OptTensor& verbatim, bool training, double eps,
                int64_t scale, int64_t activation, double activation_param, int64_t shared, const std::string& name);

// An activation without a norm: z, with a node that keeps it. With this mean, variance and eps a norm of one channel is
// the identity. Returns an undefined tensor, and does nothing, if the call needs Python.
Tensor activation_alone(const Tensor& x, const Tensor& mean, const Tensor& var, double eps, int64_t scale,
                        int64_t activation, double activation_param, const std::string& name);

// Whether `attached` does it, if nothing changes in between.
bool may_attach(const Tensor& x, const Tensor& z, const OptTensor& weight, const OptTensor& bias,
                const OptTensor& residual);

// The references to a gradient that Python has seen, from Python and from C++, and to a saved output's storage.
struct Holders {
  std::optional<std::pair<int64_t, int64_t>> gradient;
  std::optional<int64_t> output;
};

// Sets the counts at which backward is the only holder. Until they are set, no graph is built.
void set_sole_holders(const Holders& holders);

// The counts that the calling thread's last backward saw. There is none for a gradient that only the engine refers to.
Holders last_counts();

}  // namespace inplace_abn
