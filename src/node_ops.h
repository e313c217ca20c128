// The signatures of the ops, by which the dispatcher is called; inplace_abn/ops.py says what each one does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace inplace_abn {

using OptTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor> statistics(const at::Tensor& x);

std::tuple<at::Tensor, at::Tensor, at::Tensor> combine(const at::Tensor& gathered, const OptTensor& running_mean,
                                                       const OptTensor& running_var, double momentum,
                                                       const OptTensor& momentum_tensor);

void forward(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& var, const OptTensor& weight,
             const OptTensor& bias, const OptTensor& residual, double eps, bool signed_weight, int64_t activation,
             double activation_param, bool invertible);

std::tuple<at::Tensor, at::Tensor> local_forward(const at::Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                 const OptTensor& residual, const OptTensor& running_mean,
                                                 const OptTensor& running_var, double momentum,
                                                 const OptTensor& momentum_tensor, double eps, bool signed_weight,
                                                 int64_t activation, double activation_param, bool invertible);

std::tuple<at::Tensor, at::Tensor> backward_reduce(const at::Tensor& y_act, const at::Tensor& dy_act,
                                                   const OptTensor& weight, const OptTensor& bias,
                                                   const OptTensor& residual, double eps, bool signed_weight,
                                                   int64_t activation, double activation_param);

std::tuple<at::Tensor, at::Tensor> backward_reduce_out(const at::Tensor& y_act, const at::Tensor& dy_act,
                                                       const OptTensor& weight, const OptTensor& bias,
                                                       const OptTensor& residual, double eps, bool signed_weight,
                                                       int64_t activation, double activation_param,
                                                       const at::Tensor& xhat, const at::Tensor& dy);

void backward(const at::Tensor& xhat, const at::Tensor& dy, const at::Tensor& var, const OptTensor& weight, double eps,
              bool signed_weight, const OptTensor& mean_dy, const OptTensor& mean_xhat_dy);

void backward_out(const at::Tensor& xhat, const at::Tensor& dy, const at::Tensor& var, const OptTensor& weight,
                  double eps, bool signed_weight, const OptTensor& mean_dy, const OptTensor& mean_xhat_dy,
                  const at::Tensor& dx);

void local_backward(const at::Tensor& y_act, const at::Tensor& dy_act, const at::Tensor& var, const OptTensor& weight,
                    const OptTensor& bias, const OptTensor& residual, double eps, bool signed_weight,
                    int64_t activation, double activation_param, bool training, const OptTensor& dx,
                    const OptTensor& dweight, const OptTensor& dbias, const OptTensor& dresidual,
                    const OptTensor& xhat);

}  // namespace inplace_abn
