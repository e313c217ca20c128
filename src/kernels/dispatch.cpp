// The ops of forward over channels. dispatch_backward.cpp has those of backward, and dispatch_rows.cpp those that know
// no channels. Ops check their arguments and call a backend. They know devices, and nothing of autograd.
//
// Ops are public, so each checks all that its kernel relies on, before it writes anything. The caller of an op bumps
// the version counters of what it writes, because torch's stable ABI has no call for it: ops.py and node.cpp do.
// Keyword outputs may be the same tensors as inputs (as in torch.add(a, b, out=a)), or disjoint from them.

#include <optional>
#include <tuple>
#include <utility>

#include "backends.h"
#include "inplace_abn/checks.h"
#include "inplace_abn/kernels.h"
#include "inplace_abn/tensors.h"
#include "operands.h"
#include "torchs_activation.h"

namespace inplace_abn {
namespace {

template <typename scalar_t>
void statistics_of(const Tensor& x, const StatisticsArgs<scalar_t>& args) {
  if (args.extent.shared > 1) {
    CALL_BACKEND(x, group_statistics, args);
  } else {
    CALL_BACKEND(x, statistics, args);
  }
}

// The steps of a call whose channels share statistics in groups. The kernels of the fused calls finish each channel
// alone.
template <typename scalar_t>
void forward_of_groups(const Tensor& x, const LocalForwardArgs<scalar_t>& args) {
  statistics_of(x, StatisticsArgs<scalar_t>{args.extent, args.x, args.mean, args.var});
  const ForwardArgs<scalar_t> forward{args.extent,       args.x,       args.z,          {args.mean, false},
                                      {args.var, false}, args.affine,  args.activation, args.invertible,
                                      args.residual,     args.verbatim};
  CALL_BACKEND(x, forward, forward);
}

void check(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
           const OptTensor& running_mean, const OptTensor& running_var) {
  constexpr auto op = "inplace_abn::check";
  check_activations(op, "x", x);
  check_written(op, "x", x);
  check_channels(op, "weight", weight, x);
  check_channels(op, "bias", bias, x);
  check_residual(op, residual, "x", x);
  check_running(op, running_mean, running_var, x);
  check_parameters_apart(op, x, weight, bias, running_mean, running_var);
}

std::tuple<Tensor, Tensor> statistics(const Tensor& x, int64_t shared) {
  constexpr auto op = "inplace_abn::statistics";
  check_activations(op, "x", x);
  check_shared(op, shared, x);
  const Scope state(x);
  const Tensor mean = empty_statistic(x, shared), var = empty_statistic(x, shared);
  Operands operands(x, shared);
  dispatch_types(x.scalar_type(), [&]<typename scalar_t>() {
    const StatisticsArgs<scalar_t> args{operands.extent(), operands.input<scalar_t>(x), statistic_ptr<scalar_t>(mean),
                                        statistic_ptr<scalar_t>(var)};
    for_each_instance(x, args.extent.instances, [&](int64_t i) { statistics_of(x, of_instance(args, i)); });
  });
  return {mean, var};
}

std::tuple<Tensor, Tensor, Tensor> combine(const Tensor& gathered, const OptTensor& running_mean,
                                           const OptTensor& running_var, double momentum,
                                           const OptTensor& momentum_tensor) {
  constexpr auto op = "inplace_abn::combine";
  INPLACE_ABN_CHECK(gathered.dim() == 2 && gathered.size(1) % 2 == 1, op,
                    ": expected gathered of shape (parts, 2 * channels + 1), got ", text(gathered.sizes()));
  INPLACE_ABN_CHECK(gathered.scalar_type() == ScalarType::Float || gathered.scalar_type() == ScalarType::Double, op,
                    ": expected gathered of dtype float32 or float64, got ", gathered.scalar_type());
  const int64_t channels = gathered.size(1) / 2;
  const auto type = running_mean.has_value() ? running_mean->scalar_type() : gathered.scalar_type();
  const Tensor like = empty_strided({0, channels}, {channels, 1}, type, gathered);
  check_running(op, running_mean, running_var, like);
  check_momentum(op, momentum, momentum_tensor, like);
  INPLACE_ABN_CHECK(stats_type(type) == gathered.scalar_type(), op,
                    ": expected running_mean of a dtype that combines with ", gathered.scalar_type(),
                    " statistics, got ", type);

  const Scope state(gathered);
  const Tensor dense = gathered.is_contiguous() ? gathered : torch::stable::contiguous(gathered);
  const Tensor mean = empty_statistic(like), var = empty_statistic(like);
  const Tensor count = empty_strided({}, {}, gathered.scalar_type(), gathered);
  Operands operands(like);
  dispatch_types(type, [&]<typename scalar_t>() {
    using opmath_t = opmath_type<scalar_t>;
    const CombineArgs<scalar_t> args{dense.size(0),
                                     channels,
                                     static_cast<const opmath_t*>(dense.const_data_ptr()),
                                     statistic_ptr<scalar_t>(mean),
                                     statistic_ptr<scalar_t>(var),
                                     statistic_ptr<scalar_t>(count),
                                     operands.running<scalar_t>(running_mean, running_var, momentum, momentum_tensor)};
    CALL_BACKEND(gathered, combine, args);
  });
  operands.finish();
  return {mean, var, count};
}

void forward_out(const Tensor& x, const Tensor& mean, const Tensor& var, const OptTensor& weight, const OptTensor& bias,
                 const OptTensor& residual, double eps, int64_t scale, int64_t activation, double activation_param,
                 bool invertible, const OptTensor& rows, const OptTensor& verbatim, const Tensor& z) {
  constexpr auto op = "inplace_abn::forward";
  check_forward(op, x, z, weight, bias, residual, std::nullopt, std::nullopt, eps, scale, activation, activation_param);
  check_channels(op, "mean", mean, x);
  check_channels(op, "var", var, x);
  check_apart(op, "mean", mean, "x", z);
  check_apart(op, "var", var, "x", z);
  check_verbatim(op, rows, verbatim, x, {&x, &z}, true);

  const Scope state(x);
  Operands operands(x);
  const KernelActivation kernel_activation(activation, activation_param, invertible);
  dispatch_types(x.scalar_type(), [&]<typename scalar_t>() {
    const ForwardArgs<scalar_t> args{operands.extent(),
                                     operands.input<scalar_t>(x),
                                     operands.output<scalar_t>(z),
                                     operands.channels<scalar_t>(mean),
                                     operands.channels<scalar_t>(var),
                                     operands.affine<scalar_t>(weight, bias, eps, scale),
                                     kernel_activation.args,
                                     invertible,
                                     operands.optional_input<scalar_t>(residual),
                                     operands.written_verbatim<scalar_t>(rows, verbatim)};
    CALL_BACKEND(x, forward, args);
  });
  operands.finish();
  kernel_activation.finish(z);
}

void forward(const Tensor& x, const Tensor& mean, const Tensor& var, const OptTensor& weight, const OptTensor& bias,
             const OptTensor& residual, double eps, int64_t scale, int64_t activation, double activation_param,
             bool invertible, const OptTensor& rows, const OptTensor& verbatim) {
  forward_out(x, mean, var, weight, bias, residual, eps, scale, activation, activation_param, invertible, rows,
              verbatim, x);
}

std::tuple<Tensor, Tensor> local_forward_out(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                             const OptTensor& residual, const OptTensor& running_mean,
                                             const OptTensor& running_var, double momentum,
                                             const OptTensor& momentum_tensor, double eps, int64_t scale,
                                             int64_t activation, double activation_param, bool invertible,
                                             int64_t shared, const OptTensor& rows, const OptTensor& verbatim,
                                             const Tensor& z) {
  constexpr auto op = "inplace_abn::local_forward";
  check_forward(op, x, z, weight, bias, residual, running_mean, running_var, eps, scale, activation, activation_param,
                shared);
  check_momentum(op, momentum, momentum_tensor, x);
  check_shared(op, shared, x);
  INPLACE_ABN_CHECK(shared < 2 || !running_mean.has_value(), op,
                    ": expected no running statistics where channels share statistics");
  check_verbatim(op, rows, verbatim, x, {&x, &z}, true);

  const Scope state(x);
  const Tensor mean = empty_statistic(x, shared), var = empty_statistic(x, shared);
  Operands operands(x, shared);
  const KernelActivation kernel_activation(activation, activation_param, invertible);
  dispatch_types(x.scalar_type(), [&]<typename scalar_t>() {
    const LocalForwardArgs<scalar_t> args{
        operands.extent(),
        operands.input<scalar_t>(x),
        operands.output<scalar_t>(z),
        statistic_ptr<scalar_t>(mean),
        statistic_ptr<scalar_t>(var),
        operands.affine<scalar_t>(weight, bias, eps, scale),
        kernel_activation.args,
        invertible,
        operands.running<scalar_t>(running_mean, running_var, momentum, momentum_tensor),
        operands.optional_input<scalar_t>(residual),
        operands.written_verbatim<scalar_t>(rows, verbatim)};
    if (shared > 1) {
      for_each_instance(x, args.extent.instances, [&](int64_t i) { forward_of_groups(x, of_instance(args, i)); });
    } else {
      CALL_BACKEND_PER_INSTANCE(x, local_forward, args);
    }
  });
  operands.finish();
  kernel_activation.finish(z);
  return {mean, var};
}

std::tuple<Tensor, Tensor> local_forward(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                         const OptTensor& residual, const OptTensor& running_mean,
                                         const OptTensor& running_var, double momentum,
                                         const OptTensor& momentum_tensor, double eps, int64_t scale,
                                         int64_t activation, double activation_param, bool invertible, int64_t shared,
                                         const OptTensor& rows, const OptTensor& verbatim) {
  return local_forward_out(x, weight, bias, residual, running_mean, running_var, momentum, momentum_tensor, eps, scale,
                           activation, activation_param, invertible, shared, rows, verbatim, x);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("check", TORCH_BOX(&check));
  m.impl("statistics", TORCH_BOX(&statistics));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward.out", TORCH_BOX(&forward_out));
  m.impl("local_forward", TORCH_BOX(&local_forward));
  m.impl("local_forward.out", TORCH_BOX(&local_forward_out));
}

IMPLEMENT_OPS(register_ops)

}  // namespace
}  // namespace inplace_abn
