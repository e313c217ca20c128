// The gradients of norms of rows, from their output. They are those of inplace_abn/autograd/rows.py.

#include <tuple>
#include <vector>

#include "calls.h"
#include "gradients.h"

namespace inplace_abn {
namespace {

using RowsBackward = void(const Tensor& y, const Tensor& dy, const Tensor& rstd, const OptTensor& weight,
                          const OptTensor& bias, double eps, bool centred, bool is_xhat, const OptTensor& dx,
                          const OptTensor& dweight, const OptTensor& dbias);

// xhat from y, but for some columns, of which it was saved. By an op that autograd/rows.py defines.
Tensor recovered(const NodeSaved& saved, at::ScalarType dtype) {
  using Op = Tensor(const Tensor& y, const OptTensor& weight, const OptTensor& bias, const Tensor& columns,
                    const Tensor& verbatim, at::ScalarType dtype);
  const auto& [weight, bias, rstd, columns, verbatim] = saved.values;
  return call<Op>("inplace_abn::recovered_rows", "", saved.z, weight, bias, *columns, *verbatim, dtype);
}

}  // namespace

variable_list gradients_of_rows(const NodeSaved& saved, const Tensor& dy, const std::vector<bool>& needed,
                                const NodeSettings& settings, bool own_dy) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto wide = wide_type(dy), dtype = dy.scalar_type();
  // The output of a norm by hand may be wider than its parameters.
  const auto fitting = [&](const OptTensor& t) {
    return t.has_value() && t->scalar_type() != dtype ? OptTensor(t->to(wide)) : t;
  };
  const OptTensor weight = fitting(saved.values.weight), bias = fitting(saved.values.bias);
  const bool is_xhat = saved.values.verbatim.has_value();
  const auto as_matrix = [](const Tensor& t) { return t.reshape({-1, t.size(-1)}).contiguous(); };
  const Tensor y = as_matrix(is_xhat ? recovered(saved, dtype) : saved.z.to(dtype)), g = as_matrix(dy);
  const auto sum_like = [](bool need, const OptTensor& t) {
    return need && t.has_value() ? OptTensor(uninitialised_like(*t)) : std::nullopt;
  };
  const auto like = [](const OptTensor& sum, const OptTensor& t) {
    return sum.has_value() ? sum->to(t->scalar_type()) : Tensor();
  };
  const OptTensor dweight = sum_like(needed.at(1), weight), dbias = sum_like(needed.at(2), bias);
  OptTensor dx;
  if (needed.at(0)) dx = own_dy ? g : uninitialised_like(g);
  call<RowsBackward>("inplace_abn::rows_backward", "", y, g, saved.values.var.reshape(-1).to(wide), weight, bias,
                     least_weight_of_rows, settings.rows == layer_norm, is_xhat, dx, dweight, dbias);
  bump_version(dx);
  return {dx.has_value() ? dx->view(dy.sizes()) : Tensor(), like(dweight, saved.values.weight),
          like(dbias, saved.values.bias), Tensor()};
}

}  // namespace inplace_abn
