// Argument checks. Every message names the op, the argument, what was expected and what was got.
//
// Not every release of torch carries the class of an error to Python, so ops.py derives it from the message. Messages
// start with the full name of the op. Only errors about a dtype say "dtype" (TypeError), only errors about memory that
// tensors share say "it overlaps" (RuntimeError). All others become a ValueError.
#pragma once

#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "inplace_abn/kernels.h"
#include "inplace_abn/tensors.h"

// Parts of the message are evaluated only where the condition fails.
#define INPLACE_ABN_CHECK_AS(exception, condition, ...)          \
  do {                                                           \
    if (!(condition)) [[unlikely]]                               \
      throw exception(::inplace_abn::concatenated(__VA_ARGS__)); \
  } while (false)
#define INPLACE_ABN_CHECK(condition, ...) INPLACE_ABN_CHECK_AS(std::invalid_argument, condition, __VA_ARGS__)

namespace inplace_abn {

template <typename... Parts>
std::string concatenated(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return message.str();
}

inline void check_activations(const char* op, const char* name, const Tensor& t) {
  INPLACE_ABN_CHECK(t.layout() == torch::headeronly::Layout::Strided, op, ": expected a strided ", name);
  INPLACE_ABN_CHECK(t.dim() >= 2, op, ": expected ", name, " of shape (batch, channel, *), got ", t.dim(),
                    "-dimensional ", text(t.sizes()));
  const ScalarType type = t.scalar_type();
  INPLACE_ABN_CHECK(type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
                        type == ScalarType::Half,
                    op, ": expected ", name, " of dtype float64, float32, bfloat16 or float16, got ", type);
}

inline void check_written(const char* op, const char* name, const Tensor& t) {
  INPLACE_ABN_CHECK(t.numel() == 0 || non_overlapping(geometry(t)), op, ": expected ", name,
                    " without internal overlap, because it is written in place; got shape ", text(t.sizes()),
                    " with strides ", text(t.strides()), ". Pass ", name, ".clone() instead");
}

// The number of values in vectors that go with x. With `shared`, each sample has its own.
inline int64_t vector_size(const Tensor& x, int64_t shared) {
  return (shared > 0 ? x.size(0) : 1) * x.size(1);
}

// `t` has one value per channel of x, or of each of its samples, on x's device, in x's dtype or in the dtype of its
// statistics.
inline void check_channels(const char* op, const char* name, const Tensor& t, const Tensor& x, int64_t shared = 0) {
  INPLACE_ABN_CHECK(t.dim() == 1 && t.size(0) == vector_size(x, shared), op, ": expected ", name, " of shape (",
                    vector_size(x, shared), ",) for x of shape ", text(x.sizes()), ", got ", text(t.sizes()));
  INPLACE_ABN_CHECK(same_device(t, x), op, ": expected ", name, " on ", text(x.device()), " like x, got ",
                    text(t.device()));
  INPLACE_ABN_CHECK(same_dtype(t, x) || t.scalar_type() == stats_type(x.scalar_type()), op, ": expected ", name,
                    " of dtype ", stats_type(x.scalar_type()), " or of x's dtype ", x.scalar_type(), ", got ",
                    t.scalar_type());
}

inline void check_channels(const char* op, const char* name, const OptTensor& t, const Tensor& x, int64_t shared = 0) {
  if (t.has_value()) check_channels(op, name, *t, x, shared);
}

inline void check_like(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  INPLACE_ABN_CHECK(equal(t.sizes(), x.sizes()), op, ": expected ", name, " of shape ", text(x.sizes()), ", got ",
                    text(t.sizes()));
  INPLACE_ABN_CHECK(same_dtype(t, x), op, ": expected ", name, " of dtype ", x.scalar_type(), ", got ",
                    t.scalar_type());
  INPLACE_ABN_CHECK(same_device(t, x), op, ": expected ", name, " on ", text(x.device()), ", got ", text(t.device()));
  INPLACE_ABN_CHECK(t.layout() == torch::headeronly::Layout::Strided, op, ": expected a strided ", name);
}

inline void check_residual(const char* op, const OptTensor& residual, const char* written_name, const Tensor& written) {
  if (!residual.has_value()) return;
  check_like(op, "residual", *residual, written);
  INPLACE_ABN_CHECK(!ranges_meet(*residual, written), op, ": expected residual in memory of its own, because ",
                    written_name, " is written in place; it shares ", written_name,
                    "'s. Pass residual.clone() instead");
}

// `t` is a vector that is read while `written` is written.
inline void check_apart(const char* op, const char* name, const OptTensor& t, const char* written_name,
                        const Tensor& written) {
  INPLACE_ABN_CHECK(!t.has_value() || !ranges_meet(*t, written), op, ": expected ", name,
                    " in memory of its own, because ", written_name, " is written in place; it shares ", written_name,
                    "'s. Pass ", name, ".clone() instead");
}

// Refuses an output that overlaps another tensor of the call. If `whole`, it may be exactly that tensor.
inline void check_overlap(const char* op, const char* name, const Tensor& output, const Tensor& other, bool whole) {
  INPLACE_ABN_CHECK_AS(std::runtime_error,
                       !partly_overlap(output, other) && (whole || !is_same(output, other) || output.numel() == 0), op,
                       ": expected ", name, " in memory of its own", whole ? " or exactly that of an input" : "",
                       ", but it overlaps another tensor of the call. Pass other memory");
}

inline void check_running(const char* op, const OptTensor& mean, const OptTensor& var, const Tensor& x,
                          int64_t shared = 0) {
  INPLACE_ABN_CHECK(mean.has_value() == var.has_value(), op,
                    ": expected running_mean and running_var both or neither, got only ",
                    mean.has_value() ? "running_mean" : "running_var");
  check_channels(op, "running_mean", mean, x, shared);
  check_channels(op, "running_var", var, x, shared);
  if (mean.has_value()) {
    check_written(op, "running_mean", *mean);
    check_written(op, "running_var", *var);
    check_apart(op, "running_mean", mean, "x", x);
    check_apart(op, "running_var", var, "x", x);
    check_apart(op, "running_mean", mean, "running_var", *var);
  }
  INPLACE_ABN_CHECK(!mean.has_value() || same_dtype(*mean, *var), op,
                    ": expected running_mean and running_var of one dtype, got ", mean->scalar_type(), " and ",
                    var->scalar_type());
}

inline void check_shared(const char* op, int64_t shared, const Tensor& x) {
  INPLACE_ABN_CHECK(shared >= 0 && (shared < 2 || x.size(1) % shared == 0), op, ": expected shared to divide the ",
                    x.size(1), " channels of x, got ", shared);
}

inline void check_eps(const char* op, double eps) {
  INPLACE_ABN_CHECK(eps > 0 && std::isfinite(eps), op, ": expected a finite eps > 0, got ", eps);
}

inline void check_scale(const char* op, int64_t scale) {
  INPLACE_ABN_CHECK(scale >= 0 && scale < scale_count, op, ": expected scale between 0 and ", scale_count - 1, ", got ",
                    scale);
}

inline void check_activation(const char* op, int64_t activation, double param) {
  const auto kind = static_cast<Activation>(activation);
  INPLACE_ABN_CHECK(activation >= 0 && activation < activation_count, op, ": unknown activation ", activation);
  INPLACE_ABN_CHECK(kind != Activation::leaky_relu || (param >= 0 && std::isfinite(param)), op,
                    ": expected a finite leaky_relu slope >= 0, got ", param);
  INPLACE_ABN_CHECK(kind != Activation::elu || (param > 0 && std::isfinite(param)), op,
                    ": expected a finite elu alpha > 0, got ", param);
}

inline void check_momentum(const char* op, double momentum, const OptTensor& momentum_tensor, const Tensor& x) {
  if (!momentum_tensor.has_value()) {
    INPLACE_ABN_CHECK(std::isfinite(momentum), op, ": expected a finite momentum, got ", momentum);
    return;
  }
  INPLACE_ABN_CHECK(momentum_tensor->scalar_type() == ScalarType::Double && momentum_tensor->numel() == 1, op,
                    ": expected momentum as one float64 value, got dtype ", momentum_tensor->scalar_type(),
                    " and shape ", text(momentum_tensor->sizes()));
  INPLACE_ABN_CHECK(same_device(*momentum_tensor, x), op, ": expected momentum on ", text(x.device()), ", got ",
                    text(momentum_tensor->device()));
}

// --- Checks that several ops share -----------------------------------------------------------------------------------

inline void check_affine(const char* op, const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                         int64_t scale, int64_t activation, double activation_param, int64_t shared = 0) {
  check_channels(op, "weight", weight, x, shared);
  check_channels(op, "bias", bias, x, shared);
  check_eps(op, eps);
  check_scale(op, scale);
  check_activation(op, activation, activation_param);
}

// A parameter's gradient is written where there is such a parameter.
inline void check_parameter_gradients(const char* op, const OptTensor& dweight, const OptTensor& dbias,
                                      const OptTensor& weight, const OptTensor& bias, const Tensor& x,
                                      int64_t shared = 0) {
  INPLACE_ABN_CHECK(!dweight.has_value() || weight.has_value(), op, ": dweight was asked for without a weight");
  INPLACE_ABN_CHECK(!dbias.has_value() || bias.has_value(), op, ": dbias was asked for without a bias");
  check_channels(op, "dweight", dweight, x, shared);
  check_channels(op, "dbias", dbias, x, shared);
}

// The parameters are read while x, and in training the running statistics, are written.
inline void check_parameters_apart(const char* op, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                   const OptTensor& running_mean, const OptTensor& running_var) {
  for (const auto& [name, t] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    check_apart(op, name, *t, "x", x);
    if (running_mean.has_value()) check_apart(op, name, *t, "running_mean", *running_mean);
    if (running_var.has_value()) check_apart(op, name, *t, "running_var", *running_var);
  }
}

inline void check_output(const char* op, const char* name, const Tensor& output, const Tensor& like,
                         std::initializer_list<const Tensor*> inputs) {
  check_like(op, name, output, like);
  check_written(op, name, output);
  for (const Tensor* input : inputs) check_overlap(op, name, output, *input, true);
}

// xhat of some channels, and the row of each channel in it; `written` says that it is an output.
inline void check_verbatim(const char* op, const OptTensor& rows, const OptTensor& xhat, const Tensor& x,
                           std::initializer_list<const Tensor*> others, bool written) {
  INPLACE_ABN_CHECK(rows.has_value() == xhat.has_value(), op, ": expected rows and verbatim both or neither, got only ",
                    rows.has_value() ? "rows" : "verbatim");
  if (!rows.has_value()) return;
  INPLACE_ABN_CHECK(rows->dim() == 1 && rows->size(0) == x.size(1), op, ": expected rows of shape (", x.size(1),
                    ",) for x of shape ", text(x.sizes()), ", got ", text(rows->sizes()));
  INPLACE_ABN_CHECK(rows->scalar_type() == ScalarType::Long, op, ": expected rows of dtype int64, got ",
                    rows->scalar_type());
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (xhat->dim() == x.dim()) sizes[1] = xhat->size(1);
  INPLACE_ABN_CHECK(equal(xhat->sizes(), sizes), op, ": expected verbatim of shape (batch, saved channels, *) for x ",
                    "of shape ", text(x.sizes()), ", got ", text(xhat->sizes()));
  INPLACE_ABN_CHECK(same_dtype(*xhat, x), op, ": expected verbatim of dtype ", x.scalar_type(), ", got ",
                    xhat->scalar_type());
  for (const auto& [name, t] : {std::pair{"rows", &*rows}, std::pair{"verbatim", &*xhat}}) {
    INPLACE_ABN_CHECK(same_device(*t, x), op, ": expected ", name, " on ", text(x.device()), ", got ",
                      text(t->device()));
  }
  if (written) check_written(op, "verbatim", *xhat);
  for (const Tensor* other : others) check_overlap(op, "verbatim", *xhat, *other, false);
}

// Checks of both forms of the forward pass.
inline void check_forward(const char* op, const Tensor& x, const Tensor& z, const OptTensor& weight,
                          const OptTensor& bias, const OptTensor& residual, const OptTensor& running_mean,
                          const OptTensor& running_var, double eps, int64_t scale, int64_t activation,
                          double activation_param, int64_t shared = 0) {
  const char* written = is_same(z, x) ? "x" : "z";
  check_activations(op, "x", x);
  check_output(op, written, z, x, {&x});
  check_residual(op, residual, written, z);
  check_running(op, running_mean, running_var, z, shared);
  check_affine(op, x, weight, bias, eps, scale, activation, activation_param, shared);
  check_parameters_apart(op, z, weight, bias, running_mean, running_var);
}

}  // namespace inplace_abn
