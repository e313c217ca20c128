// The ops: schemas, validation, and the way to a backend. Devices are known here, autograd is not.
//
// Memory an op writes has its version counter bumped, so that autograd notices a reader that comes too late. Keyword
// outputs may be the very tensors that are read (as in torch.add(a, b, out=a)); otherwise they must be disjoint from
// them.

#include <ATen/Dispatch_v2.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "inplace_abn/checks.h"
#include "inplace_abn/kernels.h"
#include "inplace_abn/ops.h"
#include "operands.h"

namespace inplace_abn {
namespace {

#define DISPATCH_TYPES(type, name, ...) \
  AT_DISPATCH_V2(type, name, AT_WRAP(__VA_ARGS__), at::kDouble, at::kFloat, at::kBFloat16, at::kHalf)

#if defined(INPLACE_ABN_WITH_CUDA)
#define CALL_BACKEND(tensor, kernel, args) ((tensor).is_cuda() ? cuda::kernel(args) : cpu::kernel(args))
#else
#define CALL_BACKEND(tensor, kernel, args) cpu::kernel(args)
#endif

Tensor empty_statistic(const Tensor& x) {
  return at::empty({x.size(1)}, x.options().dtype(stats_type(x.scalar_type())).memory_format(std::nullopt));
}

template <typename scalar_t>
at::opmath_type<scalar_t>* statistic_ptr(const Tensor& t) {
  return t.mutable_data_ptr<at::opmath_type<scalar_t>>();
}

void check_affine(const char* op, const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                  int64_t activation, double activation_param) {
  check_channels(op, "weight", weight, x);
  check_channels(op, "bias", bias, x);
  check_eps(op, eps);
  check_activation(op, activation, activation_param);
}

void check_output(const char* op, const char* name, const Tensor& output, const Tensor& like,
                  std::initializer_list<const Tensor*> inputs) {
  check_like(op, name, output, like);
  check_written(op, name, output);
  for (const Tensor* input : inputs) at::assert_no_partial_overlap(output, *input);
}

// silu without its stolen bit is torch's own, bit for bit, so it is left to torch: the kernel stops at y.
struct KernelActivation {
  KernelActivation(int64_t activation, double param, bool invertible)
      : then_silu(!invertible && static_cast<Activation>(activation) == Activation::silu),
        args{then_silu ? Activation::identity : static_cast<Activation>(activation), param} {}

  void finish(Tensor x) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (then_silu) at::silu_(x);
  }

  bool then_silu;
  ActivationArgs args;
};

}  // namespace

void check(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
           const OptTensor& running_mean, const OptTensor& running_var) {
  constexpr auto op = "inplace_abn";
  check_activations(op, "x", x);
  check_written(op, "x", x);
  check_channels(op, "weight", weight, x);
  check_channels(op, "bias", bias, x);
  check_residual(op, residual, x);
  check_running(op, running_mean, running_var, x);
}

std::tuple<Tensor, Tensor> statistics(const Tensor& x) {
  check_activations("inplace_abn::statistics", "x", x);
  const c10::DeviceGuard guard(x.device());
  const Tensor mean = empty_statistic(x), var = empty_statistic(x);
  Operands operands(x);
  DISPATCH_TYPES(x.scalar_type(), "inplace_abn::statistics", [&] {
    const StatisticsArgs<scalar_t> args{operands.extent(), operands.input<scalar_t>(x), statistic_ptr<scalar_t>(mean),
                                        statistic_ptr<scalar_t>(var)};
    CALL_BACKEND(x, statistics, args);
  });
  return {mean, var};
}

std::tuple<Tensor, Tensor, Tensor> combine(const Tensor& gathered, const OptTensor& running_mean,
                                           const OptTensor& running_var, double momentum,
                                           const OptTensor& momentum_tensor) {
  constexpr auto op = "inplace_abn::combine";
  TORCH_CHECK_VALUE(gathered.dim() == 2 && gathered.size(1) % 2 == 1, op,
                    ": expected gathered of shape (parts, 2 * channels + 1), got ", gathered.sizes());
  TORCH_CHECK_TYPE(gathered.scalar_type() == at::kFloat || gathered.scalar_type() == at::kDouble, op,
                   ": expected gathered of dtype float32 or float64, got ", gathered.scalar_type());
  const int64_t channels = gathered.size(1) / 2;
  const auto type = running_mean.has_value() ? running_mean->scalar_type() : gathered.scalar_type();
  const Tensor like = at::empty({0, channels}, gathered.options().dtype(type));
  check_running(op, running_mean, running_var, like);
  check_momentum(op, momentum, momentum_tensor, like);
  TORCH_CHECK_TYPE(stats_type(type) == gathered.scalar_type(), op, ": expected running_mean that combines with ",
                   gathered.scalar_type(), " statistics, got ", type);

  const c10::DeviceGuard guard(gathered.device());
  const Tensor dense = gathered.contiguous();
  const Tensor mean = empty_statistic(like), var = empty_statistic(like);
  const Tensor count = at::empty({}, gathered.options());
  Operands operands(like);
  DISPATCH_TYPES(type, op, [&] {
    using opmath_t = at::opmath_type<scalar_t>;
    const CombineArgs<scalar_t> args{dense.size(0),
                                     channels,
                                     dense.const_data_ptr<opmath_t>(),
                                     statistic_ptr<scalar_t>(mean),
                                     statistic_ptr<scalar_t>(var),
                                     statistic_ptr<scalar_t>(count),
                                     operands.running<scalar_t>(running_mean, running_var, momentum, momentum_tensor)};
    CALL_BACKEND(gathered, combine, args);
  });
  operands.finish();
  return {mean, var, count};
}

void forward(const Tensor& x, const Tensor& mean, const Tensor& var, const OptTensor& weight, const OptTensor& bias,
             const OptTensor& residual, double eps, bool signed_weight, int64_t activation, double activation_param,
             bool invertible) {
  constexpr auto op = "inplace_abn::forward";
  check_activations(op, "x", x);
  check_written(op, "x", x);
  check_channels(op, "mean", mean, x);
  check_channels(op, "var", var, x);
  check_residual(op, residual, x);
  check_affine(op, x, weight, bias, eps, activation, activation_param);

  const c10::DeviceGuard guard(x.device());
  Operands operands(x);
  const KernelActivation kernel_activation(activation, activation_param, invertible);
  DISPATCH_TYPES(x.scalar_type(), op, [&] {
    const ForwardArgs<scalar_t> args{operands.extent(),
                                     operands.input<scalar_t>(x),
                                     operands.output<scalar_t>(x),
                                     operands.channels<scalar_t>(mean),
                                     operands.channels<scalar_t>(var),
                                     operands.affine<scalar_t>(weight, bias, eps, signed_weight),
                                     kernel_activation.args,
                                     invertible,
                                     operands.optional_input<scalar_t>(residual)};
    CALL_BACKEND(x, forward, args);
  });
  operands.finish();
  kernel_activation.finish(x);
}

std::tuple<Tensor, Tensor> local_forward(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                         const OptTensor& residual, const OptTensor& running_mean,
                                         const OptTensor& running_var, double momentum,
                                         const OptTensor& momentum_tensor, double eps, bool signed_weight,
                                         int64_t activation, double activation_param, bool invertible) {
  constexpr auto op = "inplace_abn::local_forward";
  check_activations(op, "x", x);
  check_written(op, "x", x);
  check_residual(op, residual, x);
  check_running(op, running_mean, running_var, x);
  check_momentum(op, momentum, momentum_tensor, x);
  check_affine(op, x, weight, bias, eps, activation, activation_param);

  const c10::DeviceGuard guard(x.device());
  const Tensor mean = empty_statistic(x), var = empty_statistic(x);
  Operands operands(x);
  const KernelActivation kernel_activation(activation, activation_param, invertible);
  DISPATCH_TYPES(x.scalar_type(), op, [&] {
    const LocalForwardArgs<scalar_t> args{
        operands.extent(),
        operands.input<scalar_t>(x),
        operands.output<scalar_t>(x),
        statistic_ptr<scalar_t>(mean),
        statistic_ptr<scalar_t>(var),
        operands.affine<scalar_t>(weight, bias, eps, signed_weight),
        kernel_activation.args,
        invertible,
        operands.running<scalar_t>(running_mean, running_var, momentum, momentum_tensor),
        operands.optional_input<scalar_t>(residual)};
    CALL_BACKEND(x, local_forward, args);
  });
  operands.finish();
  kernel_activation.finish(x);
  return {mean, var};
}

std::tuple<Tensor, Tensor> backward_reduce_out(const Tensor& y_act, const Tensor& dy_act, const OptTensor& weight,
                                               const OptTensor& bias, const OptTensor& residual, double eps,
                                               bool signed_weight, int64_t activation, double activation_param,
                                               const Tensor& xhat, const Tensor& dy) {
  constexpr auto op = "inplace_abn::backward_reduce";
  check_activations(op, "y_act", y_act);
  check_like(op, "dy_act", dy_act, y_act);
  check_output(op, xhat.is_same(y_act) ? "y_act" : "xhat", xhat, y_act, {&y_act, &dy_act});
  check_output(op, dy.is_same(dy_act) ? "dy_act" : "dy", dy, y_act, {&y_act, &dy_act});
  at::assert_no_overlap(xhat, dy);
  if (residual.has_value()) check_like(op, "residual", *residual, y_act);
  check_affine(op, y_act, weight, bias, eps, activation, activation_param);

  const c10::DeviceGuard guard(y_act.device());
  const Tensor sum_dy = empty_statistic(y_act), sum_xhat_dy = empty_statistic(y_act);
  Operands operands(y_act);
  DISPATCH_TYPES(y_act.scalar_type(), op, [&] {
    const BackwardReduceArgs<scalar_t> args{operands.extent(),
                                            operands.input<scalar_t>(y_act),
                                            operands.input<scalar_t>(dy_act),
                                            operands.output<scalar_t>(xhat),
                                            operands.output<scalar_t>(dy),
                                            operands.affine<scalar_t>(weight, bias, eps, signed_weight),
                                            {static_cast<Activation>(activation), activation_param},
                                            statistic_ptr<scalar_t>(sum_dy),
                                            statistic_ptr<scalar_t>(sum_xhat_dy),
                                            operands.optional_input<scalar_t>(residual)};
    CALL_BACKEND(y_act, backward_reduce, args);
  });
  operands.finish();
  return {sum_dy, sum_xhat_dy};
}

std::tuple<Tensor, Tensor> backward_reduce(const Tensor& y_act, const Tensor& dy_act, const OptTensor& weight,
                                           const OptTensor& bias, const OptTensor& residual, double eps,
                                           bool signed_weight, int64_t activation, double activation_param) {
  return backward_reduce_out(y_act, dy_act, weight, bias, residual, eps, signed_weight, activation, activation_param,
                             y_act, dy_act);
}

void backward_out(const Tensor& xhat, const Tensor& dy, const Tensor& var, const OptTensor& weight, double eps,
                  bool signed_weight, const OptTensor& mean_dy, const OptTensor& mean_xhat_dy, const Tensor& dx) {
  constexpr auto op = "inplace_abn::backward";
  check_activations(op, "xhat", xhat);
  check_like(op, "dy", dy, xhat);
  check_output(op, dx.is_same(dy) ? "dy" : "dx", dx, xhat, {&xhat, &dy});
  check_channels(op, "var", var, xhat);
  check_channels(op, "weight", weight, xhat);
  check_eps(op, eps);
  TORCH_CHECK_VALUE(mean_dy.has_value() == mean_xhat_dy.has_value(), op,
                    ": expected mean_dy and mean_xhat_dy both or neither, got only ",
                    mean_dy.has_value() ? "mean_dy" : "mean_xhat_dy");
  for (const auto& [name, mean] : {std::pair{"mean_dy", &mean_dy}, std::pair{"mean_xhat_dy", &mean_xhat_dy}}) {
    check_channels(op, name, *mean, xhat);
    TORCH_CHECK_TYPE(!mean->has_value() || (*mean)->scalar_type() == stats_type(xhat.scalar_type()), op, ": expected ",
                     name, " of dtype ", stats_type(xhat.scalar_type()), ", got ", (*mean)->scalar_type());
  }

  const c10::DeviceGuard guard(xhat.device());
  Operands operands(xhat);
  DISPATCH_TYPES(xhat.scalar_type(), op, [&] {
    using opmath_t = at::opmath_type<scalar_t>;
    const auto mean_data = [&](const OptTensor& t) {
      return static_cast<const opmath_t*>(operands.channels<scalar_t>(t).data);
    };
    const BackwardArgs<scalar_t> args{operands.extent(),
                                      operands.input<scalar_t>(xhat),
                                      operands.input<scalar_t>(dy),
                                      operands.output<scalar_t>(dx),
                                      operands.channels<scalar_t>(var),
                                      operands.affine<scalar_t>(weight, std::nullopt, eps, signed_weight),
                                      mean_data(mean_dy),
                                      mean_data(mean_xhat_dy)};
    CALL_BACKEND(xhat, backward, args);
  });
  operands.finish();
}

void backward(const Tensor& xhat, const Tensor& dy, const Tensor& var, const OptTensor& weight, double eps,
              bool signed_weight, const OptTensor& mean_dy, const OptTensor& mean_xhat_dy) {
  backward_out(xhat, dy, var, weight, eps, signed_weight, mean_dy, mean_xhat_dy, dy);
}

void local_backward(const Tensor& y_act, const Tensor& dy_act, const Tensor& var, const OptTensor& weight,
                    const OptTensor& bias, const OptTensor& residual, double eps, bool signed_weight,
                    int64_t activation, double activation_param, bool training, const OptTensor& dx,
                    const OptTensor& dweight, const OptTensor& dbias, const OptTensor& dresidual,
                    const OptTensor& xhat) {
  constexpr auto op = "inplace_abn::local_backward";
  check_activations(op, "y_act", y_act);
  check_like(op, "dy_act", dy_act, y_act);
  check_channels(op, "var", var, y_act);
  check_affine(op, y_act, weight, bias, eps, activation, activation_param);
  if (dx.has_value()) check_output(op, dx->is_same(dy_act) ? "dy_act" : "dx", *dx, y_act, {&y_act, &dy_act});
  if (residual.has_value()) check_like(op, "residual", *residual, y_act);
  if (dresidual.has_value()) {
    check_output(op, dresidual->is_same(dy_act) ? "dy_act" : "dresidual", *dresidual, y_act, {&y_act, &dy_act});
    if (dx.has_value()) at::assert_no_overlap(*dx, *dresidual);
  }
  if (xhat.has_value()) {
    TORCH_CHECK_VALUE(dx.has_value(), op, ": memory for xhat was given, but no dx was asked for");
    check_output(op, xhat->is_same(y_act) ? "y_act" : "xhat", *xhat, y_act, {&y_act, &dy_act});
    at::assert_no_overlap(*xhat, dresidual.has_value() ? *dresidual : *dx);
  }
  TORCH_CHECK_VALUE(!dweight.has_value() || weight.has_value(), op, ": dweight was asked for without a weight");
  check_channels(op, "dweight", dweight, y_act);
  check_channels(op, "dbias", dbias, y_act);

  const c10::DeviceGuard guard(y_act.device());
  Operands operands(y_act);
  DISPATCH_TYPES(y_act.scalar_type(), op, [&] {
    const LocalBackwardArgs<scalar_t> args{operands.extent(),
                                           operands.input<scalar_t>(y_act),
                                           operands.input<scalar_t>(dy_act),
                                           operands.optional_output<scalar_t>(dx),
                                           operands.channels<scalar_t>(var),
                                           operands.affine<scalar_t>(weight, bias, eps, signed_weight),
                                           {static_cast<Activation>(activation), activation_param},
                                           training,
                                           operands.written_channels<scalar_t>(dweight),
                                           operands.written_channels<scalar_t>(dbias),
                                           operands.optional_input<scalar_t>(residual),
                                           operands.optional_output<scalar_t>(dresidual),
                                           operands.optional_output<scalar_t>(xhat)};
    CALL_BACKEND(y_act, local_backward, args);
  });
  operands.finish();
}

namespace {

TORCH_LIBRARY(inplace_abn, m) {
  m.def(
      "check(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? running_mean, Tensor? running_var) "
      "-> ()");
  m.def("statistics(Tensor x) -> (Tensor mean, Tensor var)");
  m.def(
      "combine(Tensor gathered, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
      "Tensor? momentum_tensor) -> (Tensor mean, Tensor var, Tensor count)");
  m.def(
      "forward(Tensor(a!) x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool "
      "signed_weight, "
      "int activation, float activation_param, bool invertible) -> ()");
  m.def(
      "local_forward(Tensor(a!) x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(b!)? running_mean, "
      "Tensor(c!)? running_var, "
      "float momentum, Tensor? momentum_tensor, float eps, bool signed_weight, int activation, "
      "float activation_param, bool invertible) -> (Tensor mean, Tensor var)");
  m.def(
      "backward_reduce(Tensor(a!) y_act, Tensor(b!) dy_act, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
      "bool signed_weight, int activation, float activation_param) -> (Tensor sum_dy, Tensor sum_xhat_dy)");
  m.def(
      "backward_reduce.out(Tensor y_act, Tensor dy_act, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
      "bool signed_weight, "
      "int activation, float activation_param, *, Tensor(a!) xhat, Tensor(b!) dy) "
      "-> (Tensor sum_dy, Tensor sum_xhat_dy)");
  m.def(
      "backward(Tensor xhat, Tensor(a!) dy, Tensor var, Tensor? weight, float eps, bool signed_weight, "
      "Tensor? mean_dy, Tensor? mean_xhat_dy) -> ()");
  m.def(
      "backward.out(Tensor xhat, Tensor dy, Tensor var, Tensor? weight, float eps, bool signed_weight, "
      "Tensor? mean_dy, Tensor? mean_xhat_dy, *, Tensor(a!) dx) -> ()");
  m.def(
      "local_backward(Tensor y_act, Tensor dy_act, Tensor var, Tensor? weight, Tensor? bias, Tensor? residual, float "
      "eps, "
      "bool signed_weight, int activation, float activation_param, bool training, *, Tensor(a!)? dx=None, "
      "Tensor(b!)? dweight=None, Tensor(c!)? dbias=None, Tensor(d!)? dresidual=None, "
      "Tensor(e!)? xhat=None) -> ()");
}

void register_ops(torch::Library& m) {
  m.impl("check", &check);
  m.impl("statistics", &statistics);
  m.impl("combine", &combine);
  m.impl("forward", &forward);
  m.impl("local_forward", &local_forward);
  m.impl("backward_reduce", &backward_reduce);
  m.impl("backward_reduce.out", &backward_reduce_out);
  m.impl("backward", &backward);
  m.impl("backward.out", &backward_out);
  m.impl("local_backward", &local_backward);
}

TORCH_LIBRARY_IMPL(inplace_abn, CPU, m) {
  register_ops(m);
}
#if defined(INPLACE_ABN_WITH_CUDA)
TORCH_LIBRARY_IMPL(inplace_abn, CUDA, m) {
  register_ops(m);
}
#endif

}  // namespace
}  // namespace inplace_abn
