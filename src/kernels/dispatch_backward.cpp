// The ops of backward over channels (dispatch.cpp has those of forward, and what holds for all ops).

#include <optional>
#include <tuple>
#include <utility>

#include "backends.h"
#include "inplace_abn/checks.h"
#include "inplace_abn/kernels.h"
#include "inplace_abn/tensors.h"
#include "operands.h"

namespace inplace_abn {
namespace {

// The steps of a call whose channels share statistics in groups, or save xhat on a device. The kernels of the fused
// calls finish each channel alone, and have no such xhat on a device.
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
  m.impl("backward_reduce", TORCH_BOX(&backward_reduce));
  m.impl("backward_reduce.out", TORCH_BOX(&backward_reduce_out));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward.out", TORCH_BOX(&backward_out));
  m.impl("local_backward", TORCH_BOX(&local_backward));
}

IMPLEMENT_OPS(register_ops)

}  // namespace
}  // namespace inplace_abn
