// The functions of the graph node as torch ops, which any Python can call.

#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "waiting.h"

namespace inplace_abn {
namespace {

// A pair is a list of two, and nothing is an empty one.
void set_sole_holders_op(const std::vector<int64_t>& gradient, std::optional<int64_t> output) {
  Holders holders{std::nullopt, output};
  if (!gradient.empty()) holders.gradient = {gradient.at(0), gradient.at(1)};
  set_sole_holders(holders);
}

// Ops get strings as views.
Tensor plan_op(const Tensor& x, const OptTensor& weight, const OptTensor& running_mean, double momentum, double eps,
               int64_t activation, double activation_param, const OptTensor& rows, int64_t saved,
               std::string_view name) {
  return plan(x, weight, running_mean, momentum, eps, activation, activation_param, rows, saved, std::string(name));
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
      "int activation, float activation_param, int shared, Tensor? rows, int saved) -> Tensor(a!)",
      &inplace_abn);
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
      "plan(Tensor x, Tensor? weight, Tensor? running_mean, float momentum, float eps, int activation, "
      "float activation_param, Tensor? rows, int saved, str name) -> Tensor",
      &plan_op);
  m.def(
      "norm(Tensor plan, Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? batches) -> (Tensor, Tensor)",
      &norm);
  m.def("activation(int activation, float activation_param, bool settles, bool in_place) -> Tensor", &activation);
  m.def("activate(Tensor waiting, Tensor activation) -> Tensor", &activate);
  m.def("add(Tensor waiting, Tensor residual) -> (Tensor, Tensor)", &add);
  m.def("add_(Tensor waiting, Tensor residual) -> (Tensor, Tensor)", &add_);
  m.def("is_placed(Tensor waiting) -> bool", &is_placed);
  m.def("parts(Tensor waiting) -> (Tensor[], int[], float)", &parts);
  m.def(
      "wait(Tensor(a!) stand_in, Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mean, Tensor var, "
      "float eps, bool training, int shared) -> ()",
      &inplace_abn::wait);
  m.def("set_sole_holders(int[] gradient, int? output) -> ()", &set_sole_holders_op);
  m.def("last_counts() -> (int[], int?)", &last_counts_op);
}

// Modes and transforms do not see these. Those that compute look for modes themselves, and then refuse. The others must
// give what owns an object as it is.
#define INPLACE_ABN_UNSEEN(key)                  \
  TORCH_LIBRARY_IMPL(inplace_abn_node, key, m) { \
    m.impl("plan", &plan_op);                    \
    m.impl("norm", &norm);                       \
    m.impl("activation", &activation);           \
    m.impl("activate", &activate);               \
    m.impl("add", &add);                         \
    m.impl("add_", &add_);                       \
    m.impl("is_placed", &is_placed);             \
    m.impl("parts", &parts);                     \
  }

INPLACE_ABN_UNSEEN(Python)
INPLACE_ABN_UNSEEN(PreDispatch)
INPLACE_ABN_UNSEEN(FuncTorchDynamicLayerFrontMode)

}  // namespace inplace_abn
