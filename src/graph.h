// What only C++ sees of autograd's graph: who holds a tensor, whether it was written, whether it may be, and the edge
// it had before it was.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace inplace_abn {

// References to a tensor from Python (0: it has never been there, 1: none is left, 2: there are some), from C++, and to
// its storage.
using Holders = std::tuple<int64_t, int64_t, int64_t>;

// Those of a tensor whose memory can have one owner: none for wrapped or lazy tensors, for memory that torch did not
// allocate itself, and for tensors with gaps or overlaps.
std::optional<Holders> holders(const at::Tensor& t);

// Watches an output of the in-place op: whether it is written to later, also where saved-tensor hooks keep autograd
// from noticing.
class Watch {
 public:
  // After the output has its place in the graph.
  void start(const at::Tensor& output);

  // Raises if the output was written to. `unpacked` is what saved-tensor hooks made of it, which may be a copy made in
  // time, or the output itself.
  void check_unmodified(const std::optional<at::Tensor>& unpacked) const;

 private:
  c10::VariableVersion counter_{};
  uint32_t version_ = 0;
};

// Has the node of an output observe who holds the gradient it is given; before anyone else can hook the node.
void observe_gradient(const at::Tensor& output);

// The holders of the gradient that the calling thread's running backward was given, just before it was: the engine
// alone if there is one. None if another hook sees the gradient later, or where none could be observed.
std::optional<Holders> gradient_holders(const at::Tensor& gradient);

// Raises for transforms that the ops do not take part in, at the outermost level of torch.func's.
void check_transforms(const std::optional<at::Tensor>& t);

// Everything a call expects of its tensors: what the ops check themselves, but before a collective or a first op, and
// for tensors on whichever device. `requires_grad`: whether the result will.
void check_call(const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& running_mean,
                const std::optional<at::Tensor>& running_var, bool requires_grad);

// Makes `t` a stand-in, for differentiation, of what the node that made `output` got as its first input.
void set_input_edge(const at::Tensor& t, const at::Tensor& output);

}  // namespace inplace_abn
