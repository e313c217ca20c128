// The ops that know no channels: the gradients of norms of rows, a look at their weights, and the inverse of an
// activation.
#include <cmath>
#include <optional>
#include <utility>

#include "backends.h"
#include "inplace_abn/checks.h"
#include "inplace_abn/kernels.h"
#include "inplace_abn/tensors.h"
#include "operands.h"

namespace inplace_abn {
namespace {

void rows_backward(const Tensor& y, const Tensor& dy, const Tensor& rstd, const OptTensor& weight,
                   const OptTensor& bias, double eps, bool centred, bool is_xhat, const OptTensor& dx,
                   const OptTensor& dweight, const OptTensor& dbias) {
  constexpr auto op = "inplace_abn::rows_backward";
  check_activations(op, "y", y);
  check_like(op, "dy", dy, y);
  if (dx.has_value()) check_output(op, is_same(*dx, dy) ? "dy" : "dx", *dx, y, {&y, &dy});
  for (const auto& [name, t] : {std::pair{"y", &y}, std::pair{"dy", &dy}, std::pair{"dx", dx ? &*dx : &y}}) {
    const bool is_matrix = t->dim() == 2 && t->stride(1) == 1 && t->stride(0) == t->size(1);
    INPLACE_ABN_CHECK(is_matrix || t->numel() == 0, op, ": expected ", name, " to be a contiguous matrix, got strides ",
                      text(t->strides()));
  }
  INPLACE_ABN_CHECK(rstd.dim() == 1 && rstd.size(0) == y.size(0), op, ": expected rstd of shape (", y.size(0),
                    ",), got ", text(rstd.sizes()));
  INPLACE_ABN_CHECK(same_device(rstd, y), op, ": expected rstd on ", text(y.device()), ", got ", text(rstd.device()));
  INPLACE_ABN_CHECK(rstd.scalar_type() == stats_type(y.scalar_type()), op, ": expected rstd of dtype ",
                    stats_type(y.scalar_type()), ", got ", rstd.scalar_type());
  check_channels(op, "weight", weight, y);
  check_channels(op, "bias", bias, y);
  check_eps(op, eps);
  check_parameter_gradients(op, dweight, dbias, weight, bias, y);

  const Scope state(y);
  Operands operands(y);
  const Tensor dense_rstd = torch::stable::contiguous(rstd);
  dispatch_types(y.scalar_type(), [&]<typename scalar_t>() {
    // The sums come first, because dx may be written over y or dy. They are those of a batch norm without statistics,
    // whose variance matters for dx only: any vector will do.
    if (dweight.has_value() || dbias.has_value()) {
      const auto none = ChannelVector<scalar_t>{nullptr, false};
      const auto gamma = operands.channels<scalar_t>(weight), beta = operands.channels<scalar_t>(bias);
      const LocalBackwardArgs<scalar_t> sums{operands.extent(),
                                             operands.input<scalar_t>(y),
                                             operands.input<scalar_t>(dy),
                                             View<scalar_t>{},
                                             gamma ? gamma : beta,
                                             {is_xhat ? none : gamma, is_xhat ? none : beta, eps, Scale::at_least_eps},
                                             {Activation::identity, 0},
                                             false,
                                             operands.written_channels<scalar_t>(dweight),
                                             operands.written_channels<scalar_t>(dbias)};
      CALL_BACKEND(y, local_backward, sums);
    }
    if (!dx.has_value() || y.numel() == 0) return;
    const RowsBackwardArgs<scalar_t> args{y.size(0),
                                          y.size(1),
                                          static_cast<const scalar_t*>(y.const_data_ptr()),
                                          static_cast<const scalar_t*>(dy.const_data_ptr()),
                                          static_cast<const opmath_type<scalar_t>*>(dense_rstd.const_data_ptr()),
                                          operands.channels<scalar_t>(weight),
                                          operands.channels<scalar_t>(bias),
                                          centred,
                                          is_xhat,
                                          static_cast<scalar_t*>(dx->mutable_data_ptr())};
    CALL_BACKEND(y, rows_backward, args);
  });
  operands.finish();
}

// Whether xhat of a channel without a row could be lost, which is neither saved then nor recoverable: |weight| +
// `added` is less than `least`, or that or the bias is not within the channel's bounds. Nobody waits for a device: its
// weights are not looked at.
bool has_left(const Tensor& weight, const OptTensor& bias, double least, double added, const OptTensor& bounds,
              const OptTensor& rows) {
  if (has_launches(weight)) return false;
  constexpr auto op = "inplace_abn::has_left";
  INPLACE_ABN_CHECK(weight.dim() == 1, op, ": expected weight of shape (channel,), got ", text(weight.sizes()));
  INPLACE_ABN_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_cpu()), op,
                    ": expected bias of shape (", weight.size(0), ",) on the CPU");
  INPLACE_ABN_CHECK(!rows.has_value() || (rows->dim() == 1 && rows->scalar_type() == ScalarType::Long &&
                                          rows->size(0) == weight.size(0) && rows->is_cpu()),
                    op, ": expected rows of shape (", weight.size(0), ",) and dtype int64 on the CPU");
  INPLACE_ABN_CHECK(!bounds.has_value() ||
                        (bounds->dim() == 2 && bounds->scalar_type() == ScalarType::Double && bounds->size(0) == 4 &&
                         bounds->size(1) == weight.size(0) && bounds->is_cpu() && bounds->is_contiguous()),
                    op, ": expected bounds of shape (4, ", weight.size(0),
                    "), contiguous, of dtype float64 on the CPU");
  const Tensor dense = torch::stable::contiguous(weight),
               dense_bias = bias.has_value() ? torch::stable::contiguous(*bias) : dense;
  const OptTensor dense_rows = rows.has_value() ? OptTensor(torch::stable::contiguous(*rows)) : std::nullopt;
  const auto* row = dense_rows.has_value() ? static_cast<const int64_t*>(dense_rows->const_data_ptr()) : nullptr;
  const auto* bound = bounds.has_value() ? static_cast<const double*>(bounds->const_data_ptr()) : nullptr;
  const int64_t channels = weight.size(0);
  const auto is_within = [&](double value, int64_t axis, int64_t c) {
    return bound == nullptr || (value >= bound[axis * channels + c] && value <= bound[(axis + 1) * channels + c]);
  };
  bool found = false;
  dispatch_types(weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_types(dense_bias.scalar_type(), [&]<typename bias_t>() {
      using opmath_t = opmath_type<weight_t>;
      const auto* data = static_cast<const weight_t*>(dense.const_data_ptr());
      const auto* beta = static_cast<const bias_t*>(dense_bias.const_data_ptr());
      for (int64_t c = 0; c < channels; ++c) {
        const opmath_t size = std::abs(static_cast<opmath_t>(data[c]));
        // A NaN is not within bounds.
        const bool is_large = size + static_cast<opmath_t>(added) >= static_cast<opmath_t>(least);
        const bool is_known = is_within(size + added, 0, c) && (!bias.has_value() || is_within(beta[c], 2, c));
        found |= !(is_large && is_known) && (row == nullptr || row[c] < 0);
      }
    });
  });
  return found;
}

Tensor inverse(const Tensor& z, int64_t activation, double activation_param) {
  constexpr auto op = "inplace_abn::inverse";
  check_activations(op, "z", z);
  check_activation(op, activation, activation_param);
  const Scope state(z);
  const bool dense = non_overlapping(geometry(z), true);
  const Tensor walked = dense ? z : torch::stable::empty_like(z);
  if (!dense) copy(walked, z);
  const Tensor y = empty_strided(walked.sizes(), walked.strides(), stats_type(z.scalar_type()), z);
  dispatch_types(z.scalar_type(), [&]<typename scalar_t>() {
    const InverseArgs<scalar_t> args{z.numel(),
                                     static_cast<const scalar_t*>(walked.const_data_ptr()),
                                     statistic_ptr<scalar_t>(y),
                                     {static_cast<Activation>(activation), activation_param}};
    CALL_BACKEND(z, inverse, args);
  });
  return y;
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("rows_backward", TORCH_BOX(&rows_backward));
  m.impl("has_left", TORCH_BOX(&has_left));
  m.impl("inverse", TORCH_BOX(&inverse));
}

IMPLEMENT_OPS(register_ops)

}  // namespace
}  // namespace inplace_abn
