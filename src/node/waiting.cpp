// A norm whose output waits for what follows: its call, and the graph node of the tensor that stands for the output.

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>
#include <vector>

#include "calls.h"

namespace inplace_abn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using LocalForwardOut = std::tuple<Tensor, Tensor>(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                   const OptTensor& residual, const OptTensor& running_mean,
                                                   const OptTensor& running_var, double momentum,
                                                   const OptTensor& momentum_tensor, double eps, bool signed_weight,
                                                   int64_t activation, double activation_param, bool invertible,
                                                   bool per_instance, const Tensor& z);

// The norm without activation. It saves what torch's norm saves, when torch's norm saves it. Its gradient is computed
// by an op that conversion/waiting.py defines, which autograd sees.
class WaitingFunction final : public torch::autograd::Function<WaitingFunction> {
 public:
  struct Norm {
    Tensor stand_in;
    OptTensor mean;
    Tensor var;
    double eps;
    bool training, per_instance;
  };

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                               const OptTensor& residual, const Norm& norm) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight.value_or(Tensor())});
    ctx->saved_data["has"] = c10::List<bool>({weight.has_value(), bias.has_value(), residual.has_value()});
    // The value of the bias does not matter, so torch's norm does not save it either.
    if (bias.has_value()) ctx->saved_data["bias_dtype"] = bias->scalar_type();
    ctx->saved_data["mean"] = norm.mean;
    ctx->saved_data["var"] = norm.var;
    ctx->saved_data["eps"] = norm.eps;
    ctx->saved_data["training"] = norm.training;
    ctx->saved_data["per_instance"] = norm.per_instance;
    return {norm.stand_in};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    using Op = std::vector<Tensor>(const Tensor& g, const Tensor& x, const OptTensor& weight,
                                   std::optional<at::ScalarType> bias_dtype, const OptTensor& mean, const Tensor& var,
                                   const std::vector<bool>& needed, double eps, bool training, bool per_instance);
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("inplace_abn::waiting_backward", "").typed<Op>();
    variable_list results(5);
    const Tensor& g = incoming[0];
    if (!g.defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const c10::List<bool> has = data.at("has").toBoolList();
    // Edges exist for the tensors that were given only.
    size_t edge = 0;
    const auto needs = [&](bool given) { return given && ctx->needs_input_grad(edge++); };
    const bool need_x = needs(true), need_weight = needs(has[0]), need_bias = needs(has[1]),
               need_residual = needs(has[2]);
    const std::vector<bool> needed{need_x, need_weight, need_bias};
    const auto found = data.find("bias_dtype");
    std::optional<at::ScalarType> bias_dtype;
    if (found != data.end()) bias_dtype = found->second.toScalarType();
    const OptTensor mean = data.at("mean").toOptional<Tensor>();
    const std::vector<Tensor> gradients =
        handle.call(g, saved[0], optional(saved[1]), bias_dtype, mean, data.at("var").toTensor(), needed,
                    data.at("eps").toDouble(), data.at("training").toBool(), data.at("per_instance").toBool());
    size_t next = 0;
    for (size_t i = 0; i < needed.size(); ++i) {
      if (needed[i]) results[i] = gradients.at(next++);
    }
    if (need_residual) results[3] = g;
    return results;
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                const OptTensor& running_mean, const OptTensor& running_var,
                                                const OptTensor& batches, double momentum, double eps,
                                                int64_t activation, double activation_param) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor z = at::empty_like(x);
  const auto [mean, var] = call<LocalForwardOut>("inplace_abn::local_forward", "out", x, weight, bias, std::nullopt,
                                                 running_mean, running_var, momentum, std::nullopt, eps, true,
                                                 activation, activation_param, true, false, z);
  bump_version(z);
  if (batches.has_value()) {
    batches->add_(1);
    bump_version(batches);
  }
  const auto copy = [](const OptTensor& t) { return t.has_value() ? t->clone() : Tensor(); };
  return {z, var, copy(weight), copy(bias)};
}

void wait(const Tensor& stand_in, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
          const OptTensor& residual, const OptTensor& mean, const Tensor& var, double eps, bool training,
          bool per_instance) {
  WaitingFunction::apply(x, weight, bias, residual,
                         WaitingFunction::Norm{stand_in, mean, var, eps, training, per_instance});
}

}  // namespace inplace_abn
