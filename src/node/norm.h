// The graph node of a norm's output, and what becomes of it.
#pragma once

#include <string>
#include <vector>

#include "node.h"

namespace inplace_abn {

// A converted norm's call in training, by local statistics: y as torch computes it, with a node that keeps x, as
// torch's does, until something keeps y anyway. Autograd does not notice the update of the running statistics, as in
// torch. `batches`, the number of batches, is counted. Norms of samples have no running statistics here. Returns an
// undefined tensor, and does nothing, if the call needs Python.
Tensor norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
            const OptTensor& running_var, const OptTensor& batches, double momentum, double eps, int64_t shared,
            const std::string& name);

// A converted layer norm's call, the same way: y as torch computes it, over a last dimension of this size.
Tensor norm_rows(const Tensor& x, const OptTensor& weight, const OptTensor& bias, int64_t size, double eps,
                 const std::string& name);

// Gives y, which Python has computed, such a node. Its gradients do without the statistics of samples. `rows` is
// that of NodeSettings. Returns whether it did.
bool attach_norm(const Tensor& y, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                 const OptTensor& mean, const OptTensor& var, double eps, bool training, int64_t shared, int64_t rows,
                 const std::string& name);

// Makes the norm's node keep t instead of x, because something keeps t anyway. t is the output of a norm, or a sum
// whose operand of this number is one and the other one is `residual`, and is unchanged if its version is this one.
// xhat of `channels` is saved, and `rows` are the places of all channels among them. `narrow` is a copy of t in 16 bits
// that is kept instead. Returns false, and does nothing, if the call needs Python, as with a weight that has left its
// bounds (the op has_left).
bool keep(const Tensor& t, const OptTensor& residual, int64_t operand, int64_t version, const OptTensor& bounds,
          const OptTensor& rows, const OptTensor& channels, const OptTensor& narrow);

// The same for a call that Python has decided about. `saved` is t, or an alias of it, as `saved_residual` is of the
// residual. `var`, `rows` and `verbatim` are
// those of `attached`.
void keep_as(const Tensor& t, const Tensor& saved, const OptTensor& residual, const OptTensor& saved_residual,
             int64_t operand, const Tensor& var, const OptTensor& rows, const OptTensor& verbatim);

// The activation of t, as above. `mean` and `var` are those with which a norm is the identity. The result has a node of
// its own, and t has none any more if it is activated in place. Returns an undefined tensor, and does nothing, if the
// call needs Python.
Tensor activate(const Tensor& t, const Tensor& mean, const Tensor& var, const OptTensor& residual, int64_t operand,
                int64_t version, const OptTensor& bounds, int64_t activation, double activation_param, bool in_place,
                const OptTensor& rows, const OptTensor& channels);

// What the norm was called with that made t, as above: x, weight, bias, mean and var. Empty if these have changed.
std::vector<Tensor> parts(const Tensor& t, int64_t operand);

}  // namespace inplace_abn
