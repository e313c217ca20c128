// The functions of the graph node as torch ops, which any Python can call.

#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "norm.h"

namespace inplace_abn {
namespace {

// A pair is a list of two, and nothing is an empty one.
void set_sole_holders_op(const std::vector<int64_t>& gradient, std::optional<int64_t> output) {
  Holders holders{std::nullopt, output};
  if (!gradient.empty()) holders.gradient = {gradient.at(0), gradient.at(1)};
  set_sole_holders(holders);
}

// Ops get strings as views.
Tensor norm_op(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
               const OptTensor& running_var, const OptTensor& batches, double momentum, double eps, int64_t shared,
               std::string_view name) {
  return norm(x, weight, bias, running_mean, running_var, batches, momentum, eps, shared, std::string(name));
}

Tensor activation_alone_op(const Tensor& x, const Tensor& mean, const Tensor& var, double eps, int64_t scale,
                           int64_t activation, double activation_param, std::string_view name) {
  return activation_alone(x, mean, var, eps, scale, activation, activation_param, std::string(name));
}

Tensor norm_rows_op(const Tensor& x, const OptTensor& weight, const OptTensor& bias, int64_t size, double eps,
                    std::string_view name) {
  return norm_rows(x, weight, bias, size, eps, std::string(name));
}

std::tuple<std::vector<int64_t>, std::optional<int64_t>> last_counts_op() {
  const auto [gradient, output] = last_counts();
  if (!gradient) return {std::vector<int64_t>{}, output};
  return {std::vector<int64_t>{gradient->first, gradient->second}, output};
}

}  // namespace

TORCH_LIBRARY(inplace_abn_node, m) {
  m.def(
      "inplace_abn(Tensor(a!) x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(b!)? running_mean, "
      "Tensor(c!)? running_var, bool training, float momentum, Tensor? momentum_tensor, float eps, int scale, "
      "int activation, float activation_param, int shared, Tensor? rows, int saved, str name) -> Tensor(a!)",
      [](const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
         const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
         const OptTensor& momentum_tensor, double eps, int64_t scale, int64_t activation, double activation_param,
         int64_t shared, const OptTensor& rows, int64_t saved, std::string_view name) {
        return inplace_abn(x, weight, bias, residual, running_mean, running_var, training, momentum, momentum_tensor,
                           eps, scale, activation, activation_param, shared, rows, saved, std::string(name));
      });
  m.def(
      "attached(Tensor x, Tensor(a!) z, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? weight_value, "
      "Tensor? bias_value, Tensor var, Tensor? rows, Tensor? verbatim, bool training, float eps, int scale, "
      "int activation, float activation_param, int shared, str name) -> Tensor(a!)",
      [](const Tensor& x, const Tensor& z, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
         const OptTensor& weight_value, const OptTensor& bias_value, const Tensor& var, const OptTensor& rows,
         const OptTensor& verbatim, bool training, double eps, int64_t scale, int64_t activation,
         double activation_param, int64_t shared, std::string_view name) {
        return attached(x, z, weight, bias, residual, weight_value, bias_value, var, rows, verbatim, training, eps,
                        scale, activation, activation_param, shared, std::string(name));
      });
  m.def(
      "activation_alone(Tensor x, Tensor mean, Tensor var, float eps, int scale, int activation, float "
      "activation_param, "
      "str name) -> Tensor",
      &activation_alone_op);
  m.def(
      "norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? batches, float momentum, float eps, int shared, str name) -> Tensor",
      &norm_op);
  m.def("norm_rows(Tensor x, Tensor? weight, Tensor? bias, int size, float eps, str name) -> Tensor", &norm_rows_op);
  m.def(
      "attach_norm(Tensor(a!) y, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, float eps, "
      "bool training, int shared, int rows, str name) -> bool",
      [](const Tensor& y, const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& mean,
         const OptTensor& var, double eps, bool training, int64_t shared, int64_t rows, std::string_view name) {
        return attach_norm(y, x, weight, bias, mean, var, eps, training, shared, rows, std::string(name));
      });
  m.def(
      "keep(Tensor(a!) t, Tensor? residual, int operand, int version, Tensor? bounds, Tensor? rows, Tensor? channels, "
      "Tensor? narrow) -> bool",
      &keep);
  m.def(
      "keep_as(Tensor(a!) t, Tensor saved, Tensor? residual, Tensor? saved_residual, int operand, Tensor var, "
      "Tensor? rows, Tensor? verbatim) "
      "-> ()",
      &keep_as);
  m.def(
      "activate(Tensor(a!) t, Tensor mean, Tensor var, Tensor? residual, int operand, int version, Tensor? bounds, "
      "int activation, float activation_param, bool in_place, Tensor? rows, Tensor? channels) -> Tensor",
      &activate);
  m.def("parts(Tensor t, int operand) -> Tensor[]", &parts);
  m.def("set_sole_holders(int[] gradient, int? output) -> ()", &set_sole_holders_op);
  m.def("last_counts() -> (int[], int?)", &last_counts_op);
}

// Modes and transforms do not see these, which look for modes themselves, and then refuse.
#define INPLACE_ABN_UNSEEN(key)                       \
  TORCH_LIBRARY_IMPL(inplace_abn_node, key, m) {      \
    m.impl("activation_alone", &activation_alone_op); \
    m.impl("norm", &norm_op);                         \
    m.impl("norm_rows", &norm_rows_op);               \
    m.impl("activate", &activate);                    \
    m.impl("keep", &keep);                            \
    m.impl("parts", &parts);                          \
  }

INPLACE_ABN_UNSEEN(Python)
INPLACE_ABN_UNSEEN(PreDispatch)
INPLACE_ABN_UNSEEN(FuncTorchDynamicLayerFrontMode)

}  // namespace inplace_abn
