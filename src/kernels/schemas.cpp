// The ops' schemas, which declare what is written.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(inplace_abn, m) {
  m.def(
      "check(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? running_mean, Tensor? running_var) "
      "-> ()");
  m.def("statistics(Tensor x, int shared=0) -> (Tensor mean, Tensor var)");
  m.def(
      "combine(Tensor gathered, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
      "Tensor? momentum_tensor) -> (Tensor mean, Tensor var, Tensor count)");
  m.def(
      "forward(Tensor(a!) x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
      "int scale, int activation, float activation_param, bool invertible, "
      "Tensor? rows=None, Tensor(b!)? verbatim=None) -> ()");
  m.def(
      "forward.out(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
      "int scale, int activation, float activation_param, bool invertible, "
      "Tensor? rows=None, Tensor(b!)? verbatim=None, *, Tensor(a!) z) -> ()");
  m.def(
      "local_forward(Tensor(a!) x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(b!)? running_mean, "
      "Tensor(c!)? running_var, float momentum, Tensor? momentum_tensor, float eps, int scale, "
      "int activation, float activation_param, bool invertible, int shared=0, Tensor? rows=None, "
      "Tensor(d!)? verbatim=None) "
      "-> (Tensor mean, Tensor var)");
  m.def(
      "local_forward.out(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(b!)? running_mean, "
      "Tensor(c!)? running_var, float momentum, Tensor? momentum_tensor, float eps, int scale, "
      "int activation, float activation_param, bool invertible, int shared=0, Tensor? rows=None, "
      "Tensor(d!)? verbatim=None, *, Tensor(a!) z) "
      "-> (Tensor mean, Tensor var)");
  m.def(
      "backward_reduce(Tensor(a!) y_act, Tensor(b!) dy_act, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
      "int scale, int activation, float activation_param, Tensor? rows=None, Tensor? verbatim=None) "
      "-> (Tensor sum_dy, Tensor sum_xhat_dy)");
  m.def(
      "backward_reduce.out(Tensor y_act, Tensor dy_act, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
      "int scale, int activation, float activation_param, Tensor? rows=None, Tensor? verbatim=None, "
      "*, Tensor(a!) xhat, Tensor(b!) dy) "
      "-> (Tensor sum_dy, Tensor sum_xhat_dy)");
  m.def(
      "backward(Tensor xhat, Tensor(a!) dy, Tensor var, Tensor? weight, float eps, int scale, "
      "Tensor? mean_dy, Tensor? mean_xhat_dy) -> ()");
  m.def(
      "backward.out(Tensor xhat, Tensor dy, Tensor var, Tensor? weight, float eps, int scale, "
      "Tensor? mean_dy, Tensor? mean_xhat_dy, *, Tensor(a!) dx) -> ()");
  m.def(
      "local_backward(Tensor y_act, Tensor dy_act, Tensor var, Tensor? weight, Tensor? bias, Tensor? residual, "
      "float eps, int scale, int activation, float activation_param, bool training, int shared=0, "
      "Tensor? rows=None, Tensor? verbatim=None, *, Tensor(a!)? dx=None, Tensor(b!)? dweight=None, "
      "Tensor(c!)? dbias=None, Tensor(d!)? dresidual=None, Tensor(e!)? xhat=None) -> ()");
  m.def(
      "rows_backward(Tensor y, Tensor dy, Tensor rstd, Tensor? weight, Tensor? bias, float eps, bool centred, "
      "bool is_xhat, *, Tensor(a!)? dx=None, Tensor(b!)? dweight=None, Tensor(c!)? dbias=None) -> ()");
  m.def(
      "has_left(Tensor weight, Tensor? bias, float least, float added=0, Tensor? bounds=None, "
      "Tensor? rows=None) -> bool");
  m.def("inverse(Tensor z, int activation, float activation_param) -> Tensor y");
}
