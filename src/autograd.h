// The in-place op of one process as autograd sees it: what functions.py calls in eager mode.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "graph.h"
#include "node_ops.h"

namespace inplace_abn {

// z = act(gamma * (x - mean) / sqrt(var + eps) + bias + residual), written over x, which is returned with its place in
// the graph. Statistics are those of x in training, which updates the running ones, else the running ones.
at::Tensor inplace_abn(const at::Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                       const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                       const OptTensor& momentum_tensor, double eps, bool signed_weight, int64_t activation,
                       double activation_param);

// Raises if the node that made x, or what x is a view of, saved its result, which therefore cannot be overwritten.
void check_producer(const at::Tensor& x);

// What the holders of a gradient and of a saved output's storage amount to where backward is the only one. Until they
// are set, nothing is reused.
void set_sole_holders(std::vector<Holders> gradients, std::optional<int64_t> output_storage);

// What the calling thread's last backward saw of both.
using Observed = std::pair<std::optional<Holders>, std::optional<int64_t>>;
Observed last_observed();

}  // namespace inplace_abn
