// The ops: they check their arguments and call a backend. They know devices, and nothing of autograd.
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

// Calls `run` with the arguments of each instance. On the CPU, many instances are divided among the threads; of few,
// each uses all threads.
template <typename F>
void for_each_instance(const Tensor& x, int64_t instances, const F& run) {
  constexpr int64_t many = 16;
  const auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  };
  if (instances < many || has_launches(x)) {
    run_some(0, instances);
  } else {
    torch::stable::parallel_for(0, instances, 1, run_some);
  }
}

#define CALL_BACKEND_PER_INSTANCE(tensor, kernel, args) \
  for_each_instance(tensor, (args).extent.instances,    \
                    [&](int64_t i) { CALL_BACKEND(tensor, kernel, of_instance(args, i)); })

Tensor empty_statistic(const Tensor& x, int64_t shared = 0) {
  return empty_strided({vector_size(x, shared)}, {1}, stats_type(x.scalar_type()), x);
}

template <typename scalar_t>
void statistics_of(const Tensor& x, const StatisticsArgs<scalar_t>& args) {
  if (args.extent.shared > 1) {
    CALL_BACKEND(x, group_statistics, args);
  } else {
    CALL_BACKEND(x, statistics, args);
  }
}

// The steps of a call whose channels share statistics in groups, or save xhat on a device. The kernels of the fused
// calls finish each channel alone, and have no such xhat on a device.
template <typename scalar_t>
void forward_of_groups(const Tensor& x, const LocalForwardArgs<scalar_t>& args) {
  statistics_of(x, StatisticsArgs<scalar_t>{args.extent, args.x, args.mean, args.var});
  const ForwardArgs<scalar_t> forward{args.extent,       args.x,       args.z,          {args.mean, false},
                                      {args.var, false}, args.affine,  args.activation, args.invertible,
                                      args.residual,     args.verbatim};
  CALL_BACKEND(x, forward, forward);
}

template <typename scalar_t>
void backward_in_steps(const Tensor& x, const BackwardReduceArgs<scalar_t>& reduce,
                       const LocalBackwardArgs<scalar_t>& args) {
  CALL_BACKEND(x, backward_reduce, reduce);
  const ShareArgs<scalar_t> share{reduce.extent,      reduce.affine, reduce.sum_dy,
                                  reduce.sum_xhat_dy, args.dweight,  args.dbias};
  CALL_BACKEND(x, share_sums, share);
  if (args.dx.data == nullptr) return;
  const auto read = [](const View<scalar_t>& v) {
    return View<const scalar_t>{v.data, v.batch_stride, v.channel_stride};
  };
  const BackwardArgs<scalar_t> backward{args.extent,
                                        read(reduce.xhat),
                                        read(reduce.dy),
                                        args.dx,
                                        args.var,
                                        args.affine,
                                        args.training ? reduce.sum_dy : nullptr,
                                        args.training ? reduce.sum_xhat_dy : nullptr,
                                        true};
  CALL_BACKEND(x, backward, backward);
}

// Whether z does not tell the activation's slope exactly.
bool is_curved_activation(int64_t activation, double param) {
  bool found = false;
  visit_activation<float>(static_cast<Activation>(activation), param,
                          [&](auto act) { found = is_curved<decltype(act)>; });
  return found;
}

// Computes dy of the channels whose xhat is saved, before dz is overwritten, and makes `known` have it. `memory` is
// like the saved xhat.
template <typename scalar_t>
void differentiate_saved(const Tensor& y_act, const Extent& extent, const View<const scalar_t>& dz,
                         const Affine<scalar_t>& affine, const ActivationArgs& activation,
                         const View<const scalar_t>& residual, View<scalar_t> memory, Verbatim<const scalar_t>& known) {
  // Between samples, the saved xhat may have gaps that its like has not.
  if (known.xhat.instance_stride == 0) memory.instance_stride = 0;
  const VerbatimGradientArgs<scalar_t> args{extent, dz, affine, activation, residual, known, memory};
  CALL_BACKEND_PER_INSTANCE(y_act, verbatim_gradient, args);
  known.dy = {memory.data, memory.batch_stride, memory.channel_stride, memory.instance_stride};
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

std::tuple<Tensor, Tensor> backward_reduce_out(const Tensor& y_act, const Tensor& dy_act, const OptTensor& weight,
                                               const OptTensor& bias, const OptTensor& residual, double eps,
                                               int64_t scale, int64_t activation, double activation_param,
                                               const OptTensor& rows, const OptTensor& verbatim, const Tensor& xhat,
                                               const Tensor& dy) {
  constexpr auto op = "inplace_abn::backward_reduce";
  check_activations(op, "y_act", y_act);
  check_like(op, "dy_act", dy_act, y_act);
  check_output(op, is_same(xhat, y_act) ? "y_act" : "xhat", xhat, y_act, {&y_act, &dy_act});
  check_output(op, is_same(dy, dy_act) ? "dy_act" : "dy", dy, y_act, {&y_act, &dy_act});
  check_overlap(op, "dy", dy, xhat, false);
  if (residual.has_value()) check_like(op, "residual", *residual, y_act);
  check_affine(op, y_act, weight, bias, eps, scale, activation, activation_param);
  check_verbatim(op, rows, verbatim, y_act, {&xhat, &dy}, false);

  const Scope state(y_act);
  const Tensor sum_dy = empty_statistic(y_act), sum_xhat_dy = empty_statistic(y_act);
  const bool differentiates = rows.has_value() && is_curved_activation(activation, activation_param);
  const OptTensor known_dy = differentiates ? OptTensor(torch::stable::empty_like(*verbatim)) : std::nullopt;
  Operands operands(y_act);
  dispatch_types(y_act.scalar_type(), [&]<typename scalar_t>() {
    BackwardReduceArgs<scalar_t> args{operands.extent(),
                                      operands.input<scalar_t>(y_act),
                                      operands.input<scalar_t>(dy_act),
                                      operands.output<scalar_t>(xhat),
                                      operands.output<scalar_t>(dy),
                                      operands.affine<scalar_t>(weight, bias, eps, scale),
                                      {static_cast<Activation>(activation), activation_param},
                                      statistic_ptr<scalar_t>(sum_dy),
                                      statistic_ptr<scalar_t>(sum_xhat_dy),
                                      operands.optional_input<scalar_t>(residual),
                                      operands.verbatim<scalar_t>(rows, verbatim)};
    if (differentiates) {
      differentiate_saved(y_act, args.extent, args.dz, args.affine, args.activation, args.residual,
                          operands.output<scalar_t>(*known_dy), args.verbatim);
    }
    CALL_BACKEND(y_act, backward_reduce, args);
  });
  operands.finish();
  return {sum_dy, sum_xhat_dy};
}

std::tuple<Tensor, Tensor> backward_reduce(const Tensor& y_act, const Tensor& dy_act, const OptTensor& weight,
                                           const OptTensor& bias, const OptTensor& residual, double eps, int64_t scale,
                                           int64_t activation, double activation_param, const OptTensor& rows,
                                           const OptTensor& verbatim) {
  return backward_reduce_out(y_act, dy_act, weight, bias, residual, eps, scale, activation, activation_param, rows,
                             verbatim, y_act, dy_act);
}

void backward_out(const Tensor& xhat, const Tensor& dy, const Tensor& var, const OptTensor& weight, double eps,
                  int64_t scale, const OptTensor& mean_dy, const OptTensor& mean_xhat_dy, const Tensor& dx) {
  constexpr auto op = "inplace_abn::backward";
  check_activations(op, "xhat", xhat);
  check_like(op, "dy", dy, xhat);
  check_output(op, is_same(dx, dy) ? "dy" : "dx", dx, xhat, {&xhat, &dy});
  check_channels(op, "var", var, xhat);
  check_channels(op, "weight", weight, xhat);
  check_eps(op, eps);
  check_scale(op, scale);
  INPLACE_ABN_CHECK(mean_dy.has_value() == mean_xhat_dy.has_value(), op,
                    ": expected mean_dy and mean_xhat_dy both or neither, got only ",
                    mean_dy.has_value() ? "mean_dy" : "mean_xhat_dy");
  for (const auto& [name, mean] : {std::pair{"mean_dy", &mean_dy}, std::pair{"mean_xhat_dy", &mean_xhat_dy}}) {
    check_channels(op, name, *mean, xhat);
    INPLACE_ABN_CHECK(!mean->has_value() || (*mean)->scalar_type() == stats_type(xhat.scalar_type()), op, ": expected ",
                      name, " of dtype ", stats_type(xhat.scalar_type()), ", got ", (*mean)->scalar_type());
  }

  const Scope state(xhat);
  Operands operands(xhat);
  dispatch_types(xhat.scalar_type(), [&]<typename scalar_t>() {
    using opmath_t = opmath_type<scalar_t>;
    const auto mean_data = [&](const OptTensor& t) {
      return static_cast<const opmath_t*>(operands.channels<scalar_t>(t).data);
    };
    const BackwardArgs<scalar_t> args{operands.extent(),
                                      operands.input<scalar_t>(xhat),
                                      operands.input<scalar_t>(dy),
                                      operands.output<scalar_t>(dx),
                                      operands.channels<scalar_t>(var),
                                      operands.affine<scalar_t>(weight, std::nullopt, eps, scale),
                                      mean_data(mean_dy),
                                      mean_data(mean_xhat_dy)};
    CALL_BACKEND(xhat, backward, args);
  });
  operands.finish();
}

void backward(const Tensor& xhat, const Tensor& dy, const Tensor& var, const OptTensor& weight, double eps,
              int64_t scale, const OptTensor& mean_dy, const OptTensor& mean_xhat_dy) {
  backward_out(xhat, dy, var, weight, eps, scale, mean_dy, mean_xhat_dy, dy);
}

void local_backward(const Tensor& y_act, const Tensor& dy_act, const Tensor& var, const OptTensor& weight,
                    const OptTensor& bias, const OptTensor& residual, double eps, int64_t scale, int64_t activation,
                    double activation_param, bool training, int64_t shared, const OptTensor& rows,
                    const OptTensor& verbatim, const OptTensor& dx, const OptTensor& dweight, const OptTensor& dbias,
                    const OptTensor& dresidual, const OptTensor& xhat) {
  constexpr auto op = "inplace_abn::local_backward";
  check_activations(op, "y_act", y_act);
  check_shared(op, shared, y_act);
  check_like(op, "dy_act", dy_act, y_act);
  check_channels(op, "var", var, y_act, shared);
  check_affine(op, y_act, weight, bias, eps, scale, activation, activation_param, shared);
  check_verbatim(op, rows, verbatim, y_act, {}, false);
  for (const OptTensor* output : {&dx, &dresidual, &xhat}) {
    if (verbatim.has_value() && output->has_value()) check_overlap(op, "verbatim", *verbatim, **output, false);
  }
  if (dx.has_value()) check_output(op, is_same(*dx, dy_act) ? "dy_act" : "dx", *dx, y_act, {&y_act, &dy_act});
  if (residual.has_value()) check_like(op, "residual", *residual, y_act);
  if (dresidual.has_value()) {
    INPLACE_ABN_CHECK(residual.has_value(), op, ": dresidual was asked for without a residual");
    check_output(op, is_same(*dresidual, dy_act) ? "dy_act" : "dresidual", *dresidual, y_act, {&y_act, &dy_act});
    if (dx.has_value()) check_overlap(op, "dresidual", *dresidual, *dx, false);
  }
  if (xhat.has_value()) {
    INPLACE_ABN_CHECK(dx.has_value(), op, ": memory for xhat was given, but no dx was asked for");
    check_output(op, is_same(*xhat, y_act) ? "y_act" : "xhat", *xhat, y_act, {&y_act, &dy_act});
    check_overlap(op, "xhat", *xhat, dresidual.has_value() ? *dresidual : *dx, false);
  }
  check_parameter_gradients(op, dweight, dbias, weight, bias, y_act, shared);

  const Scope state(y_act);
  // The groups matter for dx only. xhat is stored, over z or what dx is written to, if these are free, and dy, where
  // dresidual or dx goes.
  const bool in_steps = (shared > 1 && training && dx.has_value()) || (rows.has_value() && has_launches(y_act));
  OptTensor sum_dy, sum_xhat_dy, stored_xhat, stored_dy;
  if (in_steps) {
    sum_dy = empty_statistic(y_act, shared);
    sum_xhat_dy = empty_statistic(y_act, shared);
    stored_dy = dresidual.has_value() ? dresidual : dx.has_value() ? dx : torch::stable::empty_like(y_act);
    stored_xhat = xhat.has_value()                          ? *xhat
                  : dresidual.has_value() && dx.has_value() ? *dx
                                                            : torch::stable::empty_like(y_act);
  }
  const bool differentiates = rows.has_value() && is_curved_activation(activation, activation_param);
  const OptTensor known_dy = differentiates ? OptTensor(torch::stable::empty_like(*verbatim)) : std::nullopt;
  Operands operands(y_act, shared);
  dispatch_types(y_act.scalar_type(), [&]<typename scalar_t>() {
    LocalBackwardArgs<scalar_t> args{operands.extent(),
                                     operands.input<scalar_t>(y_act),
                                     operands.input<scalar_t>(dy_act),
                                     operands.optional_output<scalar_t>(dx),
                                     operands.channels<scalar_t>(var),
                                     operands.affine<scalar_t>(weight, bias, eps, scale),
                                     {static_cast<Activation>(activation), activation_param},
                                     training,
                                     operands.written_channels<scalar_t>(dweight),
                                     operands.written_channels<scalar_t>(dbias),
                                     operands.optional_input<scalar_t>(residual),
                                     operands.optional_output<scalar_t>(dresidual),
                                     operands.optional_output<scalar_t>(xhat),
                                     operands.verbatim<scalar_t>(rows, verbatim)};
    if (differentiates) {
      differentiate_saved(y_act, args.extent, args.dz, args.affine, args.activation, args.residual,
                          operands.output<scalar_t>(*known_dy), args.verbatim);
    }
    if (!in_steps) {
      CALL_BACKEND_PER_INSTANCE(y_act, local_backward, args);
      return;
    }
    const BackwardReduceArgs<scalar_t> reduce{args.extent,
                                              args.z,
                                              args.dz,
                                              operands.output<scalar_t>(*stored_xhat),
                                              operands.output<scalar_t>(*stored_dy),
                                              args.affine,
                                              args.activation,
                                              statistic_ptr<scalar_t>(*sum_dy),
                                              statistic_ptr<scalar_t>(*sum_xhat_dy),
                                              args.residual,
                                              args.verbatim};
    for_each_instance(y_act, args.extent.instances,
                      [&](int64_t i) { backward_in_steps(y_act, of_instance(reduce, i), of_instance(args, i)); });
  });
  operands.finish();
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("check", TORCH_BOX(&check));
  m.impl("statistics", TORCH_BOX(&statistics));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward.out", TORCH_BOX(&forward_out));
  m.impl("local_forward", TORCH_BOX(&local_forward));
  m.impl("local_forward.out", TORCH_BOX(&local_forward_out));
  m.impl("backward_reduce", TORCH_BOX(&backward_reduce));
  m.impl("backward_reduce.out", TORCH_BOX(&backward_reduce_out));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward.out", TORCH_BOX(&backward_out));
  m.impl("local_backward", TORCH_BOX(&local_backward));
}

IMPLEMENT_OPS(register_ops)

}  // namespace
}  // namespace inplace_abn
