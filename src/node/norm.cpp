#include "norm.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/native_layer_norm.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls.h"
#include "gradients.h"
#include "norm_function.h"
#include "plain.h"

namespace inplace_abn {
namespace {

using LocalForwardOut = std::tuple<Tensor, Tensor>(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                   const OptTensor& residual, const OptTensor& running_mean,
                                                   const OptTensor& running_var, double momentum,
                                                   const OptTensor& momentum_tensor, double eps, int64_t scale,
                                                   int64_t activation, double activation_param, bool invertible,
                                                   int64_t shared, const OptTensor& rows, const OptTensor& verbatim,
                                                   const Tensor& z);

// So small that one plus it is one.
constexpr double identity_eps = 1e-30;

NodeSettings settings_of(double eps, bool training, int64_t shared, int64_t rows = 0) {
  return {eps, scale_is_weight, identity, 0.0, training, shared, rows};
}

// Whether the op takes the call, and a graph is recorded.
bool fits(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
          const OptTensor& running_var, int64_t shared) {
  if (x.dim() < 2 || x.numel() == 0 || !x.is_non_overlapping_and_dense()) return false;
  if (x.numel() <= (shared == 0 ? 1 : x.size(0)) * x.size(1) / std::max<int64_t>(shared, 1)) return false;
  // torch's norms of samples return contiguous tensors, but for the group norm on the CPU. Autocast may widen x.
  const bool is_laid_out = shared == 0 || (shared > 1 && x.is_cpu());
  if (!x.is_contiguous() && !(is_laid_out && x.is_contiguous(x.suggest_memory_format()))) return false;
  const bool is_wide = x.scalar_type() == at::kFloat;
  if (shared > 0 && !is_wide && !x.is_cpu() && at::autocast::is_autocast_enabled(x.device().type())) return false;
  for (const OptTensor* t : {&weight, &bias, &running_mean, &running_var}) {
    if (!t->has_value()) continue;
    const auto dtype = (*t)->scalar_type();
    if ((*t)->sizes() != at::IntArrayRef(x.size(1))) return false;
    if (dtype != x.scalar_type() && (dtype != at::kFloat || x.scalar_type() == at::kDouble)) return false;
  }
  return running_mean.has_value() == running_var.has_value() && torch::autograd::compute_requires_grad(x, weight, bias);
}

// The same for torch's layer norm of rows of this size, where autocast casts nothing.
bool fits_rows(const Tensor& x, const OptTensor& weight, const OptTensor& bias, int64_t size) {
  if (x.dim() < 2 || x.numel() == 0 || x.size(-1) != size) return false;
  // It makes all float32 where it has a rule for layer norms, as on CUDA and not on the CPU.
  const bool is_wide = x.scalar_type() == at::kFloat;
  if (!is_wide && !x.is_cpu() && at::autocast::is_autocast_enabled(x.device().type())) return false;
  for (const OptTensor* t : {&weight, &bias}) {
    if (!t->has_value()) continue;
    const auto dtype = (*t)->scalar_type();
    // What is computed for each call may be anything in the next one, and is not measured then.
    if ((*t)->sizes() != at::IntArrayRef(size) || !(*t)->is_leaf()) return false;
    if (dtype != x.scalar_type() && (dtype != at::kFloat || x.scalar_type() == at::kDouble)) return false;
  }
  return torch::autograd::compute_requires_grad(x, weight, bias);
}

// Counts the batch. On the CPU an op takes longer than the addition.
void count(const OptTensor& batches) {
  if (!batches.has_value()) return;
  if (batches->is_cpu() && batches->scalar_type() == at::kLong && batches->numel() == 1) {
    ++*batches->mutable_data_ptr<int64_t>();
  } else {
    batches->add_(1);
  }
}

}  // namespace

Tensor norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
            const OptTensor& running_var, const OptTensor& batches, double momentum, double eps, int64_t shared,
            const std::string& name) {
  // In inference mode no tensor that is made here has a version. What is no number may not be counted.
  if (c10::InferenceMode::is_enabled() || (batches.has_value() && batches->dim() > 0)) return {};
  if (!fits(x, weight, bias, running_mean, running_var, shared) ||
      !is_plain(x, {&weight, &bias, &running_mean, &running_var, &batches}, true)) {
    return {};
  }
  Tensor y, mean, var;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = uninitialised_like(x);
    std::tie(mean, var) = call<LocalForwardOut>("inplace_abn::local_forward", "out", x, of_samples(weight, x, shared),
                                                of_samples(bias, x, shared), std::nullopt, running_mean, running_var,
                                                momentum, std::nullopt, eps, scale_is_weight, identity, 0.0, false,
                                                shared, std::nullopt, std::nullopt, y);
    count(batches);
  }
  bump_version(batches);
  NormFunction::attach(y, x, weight, bias, mean, var, settings_of(eps, true, shared), name);
  return y;
}

Tensor norm_rows(const Tensor& x, const OptTensor& weight, const OptTensor& bias, int64_t size, double eps,
                 const std::string& name) {
  if (c10::InferenceMode::is_enabled() || !fits_rows(x, weight, bias, size) || !is_plain(x, {&weight, &bias}, true)) {
    return {};
  }
  Tensor y, mean, rstd;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(y, mean, rstd) = at::native_layer_norm(x, at::IntArrayRef(size), weight, bias, eps);
  }
  NormFunction::attach(y, x, weight, bias, mean, rstd, settings_of(eps, true, 0, layer_norm), name);
  return y;
}

bool attach_norm(const Tensor& y, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                 const OptTensor& mean, const OptTensor& var, double eps, bool training, int64_t shared, int64_t rows,
                 const std::string& name) {
  if (!torch::autograd::compute_requires_grad(x, weight, bias)) return false;
  NormFunction::attach(y, x, weight, bias, mean, var, settings_of(eps, training, shared, rows), name);
  return true;
}

bool keep(const Tensor& t, const OptTensor& residual, int64_t operand, int64_t version, const OptTensor& bounds,
          const OptTensor& rows, const OptTensor& channels, const OptTensor& narrow) {
  auto* const node = NormFunction::of(t, operand);
  if (node == nullptr || t._version() != version || !node->is_unchanged() ||
      !may_attach(node->x, t, optional(node->weight), optional(node->bias), residual) || node->has_left(bounds, rows)) {
    return false;
  }
  const bool is_of_rows = node->settings.rows != 0;
  const Tensor& kept = narrow.has_value() ? *narrow : t;
  node->keep(kept, residual, node->statistics(), is_of_rows ? channels : rows,
             node->xhat_of(channels, kept.scalar_type()));
  return true;
}

void keep_as(const Tensor& t, const Tensor& saved, const OptTensor& residual, const OptTensor& saved_residual,
             int64_t operand, const Tensor& var, const OptTensor& rows, const OptTensor& verbatim) {
  auto* const node = NormFunction::of(t, operand);
  if (node == nullptr || node->keeps_output()) return;
  node->keep(saved, saved_residual, var, rows, verbatim);
  node->kept_as({t, saved}, residual.has_value() ? Aliased(*residual, *saved_residual) : Aliased());
}

Tensor activate(const Tensor& t, const Tensor& mean, const Tensor& var, const OptTensor& residual, int64_t operand,
                int64_t version, const OptTensor& bounds, int64_t activation, double activation_param, bool in_place,
                const OptTensor& rows, const OptTensor& channels) {
  const auto* const node = NormFunction::of(t, operand);
  if (node == nullptr || t._version() != version || !node->is_unchanged() ||
      !may_attach(node->x, t, optional(node->weight), optional(node->bias), residual) || node->has_left(bounds, rows)) {
    return {};
  }
  // What follows may free the node.
  const Tensor x = node->x, var_of_norm = node->var;
  const OptTensor weight = optional(node->weight), bias = optional(node->bias),
                  verbatim = node->xhat_of(channels, t.scalar_type());
  const NodeSettings settings = node->settings;
  const std::string name = node->layer;
  Tensor z = t;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (in_place) {
      call<Forward>("inplace_abn::forward", "", t, mean, var, std::nullopt, std::nullopt, std::nullopt, identity_eps,
                    scale_is_weight, activation, activation_param, true, std::nullopt, std::nullopt);
    } else {
      z = uninitialised_like(t);
      call<ForwardOut>("inplace_abn::forward", "out", t, mean, var, std::nullopt, std::nullopt, std::nullopt,
                       identity_eps, scale_is_weight, activation, activation_param, true, std::nullopt, std::nullopt,
                       z);
    }
  }
  if (in_place) {
    bump_version(z);
    z.detach_();
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto copied = [](const OptTensor& value) { return optional(copy(value)); };
  return attached(x, z, weight, bias, residual, copied(weight), copied(bias), var_of_norm, rows, verbatim, true,
                  settings.eps, scale_is_weight, activation, activation_param, settings.shared, name);
}

std::vector<Tensor> parts(const Tensor& t, int64_t operand) {
  const auto* const node = NormFunction::of(t, operand);
  if (node == nullptr || !node->is_unchanged()) return {};
  return {node->x, node->weight, node->bias, node->mean, node->var};
}

}  // namespace inplace_abn
