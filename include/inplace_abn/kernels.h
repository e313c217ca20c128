// The contract that both backends implement: the same function names in namespaces cpu and cuda, plain structs of
// sizes, pointers and strides as arguments. dispatch.cpp has checked them. Tensors are of one instance, and may be
// empty.
//
// An output view may be the memory of an input view of the same call, with the same strides, or be disjoint from all
// inputs: element i of an output depends on the elements i of the inputs and on per-channel values only. No pointer is
// `__restrict__`, for that reason. A residual's view has null data where there is no residual.
#pragma once

#include <type_traits>

#include "inplace_abn/activation.h"
#include "inplace_abn/layout.h"

namespace inplace_abn {

// One value per channel, stored in x's type (`narrow`) or in its opmath type. `data` may be null: no such parameter.
template <typename scalar_t>
struct ChannelVector {
  using opmath_t = opmath_type<scalar_t>;
  void* data;
  bool narrow;

  INPLACE_ABN_INLINE explicit operator bool() const { return data != nullptr; }
  INPLACE_ABN_INLINE opmath_t load(int64_t c) const {
    return narrow ? static_cast<opmath_t>(static_cast<const scalar_t*>(data)[c])
                  : static_cast<const opmath_t*>(data)[c];
  }
  INPLACE_ABN_INLINE void store(int64_t c, double value) const {
    if (narrow) {
      static_cast<scalar_t*>(data)[c] = static_cast<scalar_t>(static_cast<opmath_t>(value));
    } else {
      static_cast<opmath_t*>(data)[c] = static_cast<opmath_t>(value);
    }
  }
};

// What xhat is multiplied by: |weight| + eps; the weight, moved to a magnitude of at least eps; or the weight itself.
enum class Scale : int64_t { magnitude = 0, at_least_eps = 1, weight = 2 };
constexpr int64_t scale_count = 3;

template <typename scalar_t>
struct Affine {
  using opmath_t = opmath_type<scalar_t>;
  ChannelVector<scalar_t> weight, bias;
  double eps;
  Scale scale;

  INPLACE_ABN_INLINE opmath_t gamma(int64_t c) const {
    return weight && scale == Scale::weight ? weight.load(c) : divisor(c);
  }
  // What y is mapped back to xhat with: gamma, at least eps away from zero. Where gamma is nearer, xhat is lost.
  INPLACE_ABN_INLINE opmath_t divisor(int64_t c) const {
    if (!weight) return 1;
    const opmath_t w = weight.load(c), floor = static_cast<opmath_t>(eps);
    if (scale == Scale::magnitude) return std::abs(w) + floor;
    const opmath_t magnitude = std::abs(w) < floor ? floor : std::abs(w);
    return w < 0 ? -magnitude : magnitude;
  }
  // d gamma / d weight, with sign(0) = +1: a weight that starts at zero must be able to leave it.
  INPLACE_ABN_INLINE opmath_t dgamma(int64_t c) const {
    return scale == Scale::magnitude && weight.load(c) < 0 ? opmath_t(-1) : opmath_t(1);
  }
  INPLACE_ABN_INLINE opmath_t beta(int64_t c) const { return bias ? bias.load(c) : opmath_t(0); }
  INPLACE_ABN_INLINE opmath_t inv_std(opmath_t var) const { return 1 / std::sqrt(var + static_cast<opmath_t>(eps)); }
};

// Channels whose xhat is saved beside z, which does not determine it. `rows` has each channel's row of `xhat`, or -1;
// null: there are none. Channels of all samples count on where samples have statistics of their own. `dy` is that of
// these channels in backward, if z does not tell it either.
template <typename scalar_t>
struct Verbatim {
  const int64_t* rows = nullptr;
  int64_t channels = 0, saved = 0;  // of a sample
  View<scalar_t> xhat{};
  View<const std::remove_const_t<scalar_t>> dy{};
  int64_t first = 0;  // the number of the call's first channel

  INPLACE_ABN_INLINE explicit operator bool() const { return rows != nullptr; }
  INPLACE_ABN_INLINE int64_t row(int64_t c) const {
    if (rows == nullptr) return -1;
    const int64_t sample = (first + c) / channels, row = rows[first + c - sample * channels];
    return row < 0 || row >= saved ? -1 : sample * saved + row;
  }
};

struct ActivationArgs {
  Activation kind;
  double param;
};

// running = (1 - momentum) * running + momentum * batch, with the unbiased batch variance. `momentum_tensor`, one
// double, stands in for `momentum` where that is only known on the device. Vectors may be null.
template <typename scalar_t>
struct RunningUpdate {
  ChannelVector<scalar_t> mean, var;
  double momentum;
  const double* momentum_tensor;

  INPLACE_ABN_INLINE void apply(int64_t c, double batch_mean, double batch_var, double count) const {
    if (!mean || count < 2) return;
    const double factor = momentum_tensor != nullptr ? *momentum_tensor : momentum;
    mean.store(c, (1 - factor) * static_cast<double>(mean.load(c)) + factor * batch_mean);
    var.store(c, (1 - factor) * static_cast<double>(var.load(c)) + factor * batch_var * (count / (count - 1)));
  }
};

// mean and biased variance of x per channel, or for `group_statistics` per group of channels, given to each channel of
// the group; zero for an empty x.
template <typename scalar_t>
struct StatisticsArgs {
  Extent extent;
  View<const scalar_t> x;
  opmath_type<scalar_t>*mean, *var;
};

// Merges the statistics of `parts` shares of a batch, laid out [parts][2 * channels + 1]: means, variances, count.
template <typename scalar_t>
struct CombineArgs {
  int64_t parts, channels;
  const opmath_type<scalar_t>* gathered;
  opmath_type<scalar_t>*mean, *var, *count;
  RunningUpdate<scalar_t> running;
};

// z = act(gamma * (x - mean) * inv_std + beta + residual)
template <typename scalar_t>
struct ForwardArgs {
  Extent extent;
  View<const scalar_t> x;
  View<scalar_t> z;
  ChannelVector<scalar_t> mean, var;
  Affine<scalar_t> affine;
  ActivationArgs activation;
  bool invertible;
  View<const scalar_t> residual{};
  Verbatim<scalar_t> verbatim{};  // written
};

// statistics and forward in one, with the running statistics updated.
template <typename scalar_t>
struct LocalForwardArgs {
  Extent extent;
  View<const scalar_t> x;
  View<scalar_t> z;
  opmath_type<scalar_t>*mean, *var;
  Affine<scalar_t> affine;
  ActivationArgs activation;
  bool invertible;
  RunningUpdate<scalar_t> running;
  View<const scalar_t> residual{};
  Verbatim<scalar_t> verbatim{};  // written
};

// xhat = (act^-1(z) - residual - beta) / gamma and dy = dz * act'(y), and the sums over dy and xhat * dy.
template <typename scalar_t>
struct BackwardReduceArgs {
  Extent extent;
  View<const scalar_t> z, dz;
  View<scalar_t> xhat, dy;
  Affine<scalar_t> affine;
  ActivationArgs activation;
  opmath_type<scalar_t>*sum_dy, *sum_xhat_dy;
  View<const scalar_t> residual{};
  Verbatim<const scalar_t> verbatim{};
};

// dy = dz * act'(gamma * xhat + beta + residual) of the channels whose xhat is saved, for activations that are curved.
template <typename scalar_t>
struct VerbatimGradientArgs {
  Extent extent;
  View<const scalar_t> dz;
  Affine<scalar_t> affine;
  ActivationArgs activation;
  View<const scalar_t> residual;
  Verbatim<const scalar_t> verbatim;
  View<scalar_t> dy;  // its channels are the rows of `verbatim`
};

// dx = gamma * inv_std * (dy - mean_dy - xhat * mean_xhat_dy); null means are zero (frozen statistics). If
// `of_gamma_dy`, the means are those of gamma * dy: dx = inv_std * (gamma * dy - mean_dy - xhat * mean_xhat_dy).
template <typename scalar_t>
struct BackwardArgs {
  Extent extent;
  View<const scalar_t> xhat, dy;
  View<scalar_t> dx;
  ChannelVector<scalar_t> var;
  Affine<scalar_t> affine;
  const opmath_type<scalar_t>*mean_dy, *mean_xhat_dy;
  bool of_gamma_dy = false;

  // What dy is multiplied by, and what the means are.
  INPLACE_ABN_INLINE opmath_type<scalar_t> of_dy(int64_t c) const {
    return affine.gamma(c) * affine.inv_std(var.load(c));
  }
  INPLACE_ABN_INLINE opmath_type<scalar_t> of_means(int64_t c) const {
    return of_gamma_dy ? affine.inv_std(var.load(c)) : of_dy(c);
  }
};

// backward_reduce and backward in one. dresidual is dy. All outputs may be null. Backends may use `xhat`, which may be
// z itself or, if there is a dresidual, dx, to invert z once instead of twice; and dx, if there is no dresidual, for
// dy.
template <typename scalar_t>
struct LocalBackwardArgs {
  Extent extent;
  View<const scalar_t> z, dz;
  View<scalar_t> dx;
  ChannelVector<scalar_t> var;
  Affine<scalar_t> affine;
  ActivationArgs activation;
  bool training;
  ChannelVector<scalar_t> dweight, dbias;
  View<const scalar_t> residual{};
  View<scalar_t> dresidual{}, xhat{};
  Verbatim<const scalar_t> verbatim{};  // on the CPU only
};

// From the sums over dy and xhat * dy per channel: the gradients of the parameters, and, written over the sums, the
// means of gamma * dy and gamma * xhat * dy over the channel's group.
template <typename scalar_t>
struct ShareArgs {
  Extent extent;
  Affine<scalar_t> affine;
  opmath_type<scalar_t>*sum_dy, *sum_xhat_dy;
  ChannelVector<scalar_t> dweight, dbias;
};

// y with act(y) = z, of `count` elements that follow each other.
template <typename scalar_t>
struct InverseArgs {
  int64_t count;
  const scalar_t* z;
  opmath_type<scalar_t>* y;
  ActivationArgs activation;
};

// dx of a norm that normalises each row of a matrix, from its output y = weight * xhat + bias, or from xhat:
//   g = dy * weight        dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without mean(g) unless `centred`
template <typename scalar_t>
struct RowsBackwardArgs {
  using opmath_t = opmath_type<scalar_t>;
  int64_t rows, columns;
  const scalar_t *y, *dy;
  const opmath_t* rstd;
  ChannelVector<scalar_t> weight, bias;
  bool centred, is_xhat;
  scalar_t* dx;

  INPLACE_ABN_INLINE opmath_t gamma(int64_t c) const { return weight ? weight.load(c) : opmath_t(1); }
  INPLACE_ABN_INLINE opmath_t beta(int64_t c) const { return bias && !is_xhat ? bias.load(c) : opmath_t(0); }
  // Where the weight is zero, xhat does not matter.
  INPLACE_ABN_INLINE opmath_t inverse(opmath_t gamma) const {
    const opmath_t g = is_xhat ? opmath_t(1) : gamma;
    return g == 0 ? opmath_t(0) : 1 / g;
  }
};

// --- Parts of a call's tensors ---------------------------------------------------------------------------------------

template <typename T>
T* from_channel(T* values, int64_t c) {
  return values == nullptr ? nullptr : values + c;
}

template <typename scalar_t>
ChannelVector<scalar_t> from_channel(const ChannelVector<scalar_t>& vector, int64_t c) {
  if (!vector) return vector;
  const int64_t size = vector.narrow ? sizeof(scalar_t) : sizeof(opmath_type<scalar_t>);
  return {static_cast<char*>(vector.data) + c * size, vector.narrow};
}

template <typename scalar_t>
Affine<scalar_t> from_channel(const Affine<scalar_t>& affine, int64_t c) {
  return {from_channel(affine.weight, c), from_channel(affine.bias, c), affine.eps, affine.scale};
}

template <typename scalar_t>
RunningUpdate<scalar_t> from_channel(const RunningUpdate<scalar_t>& running, int64_t c) {
  return {from_channel(running.mean, c), from_channel(running.var, c), running.momentum, running.momentum_tensor};
}

template <typename scalar_t>
View<scalar_t> from_instance(const View<scalar_t>& view, int64_t i) {
  if (view.data == nullptr) return view;
  return {view.data + i * view.instance_stride, view.batch_stride, view.channel_stride};
}

// Instances of a view with no distance between them are parts of its channels.
template <typename scalar_t>
Verbatim<scalar_t> from_instance(const Verbatim<scalar_t>& verbatim, int64_t i, int64_t channels) {
  Verbatim<scalar_t> own = verbatim;
  own.xhat = from_instance(verbatim.xhat, i);
  own.dy = from_instance(verbatim.dy, i);
  if (verbatim.xhat.instance_stride == 0) own.first = i * channels;
  return own;
}

// The call for instance `i` alone. Vectors have the channels of one instance after those of another.
template <typename scalar_t>
StatisticsArgs<scalar_t> of_instance(const StatisticsArgs<scalar_t>& args, int64_t i) {
  const int64_t c = i * args.extent.channels;
  StatisticsArgs<scalar_t> own = args;
  own.extent.instances = 1;
  own.x = from_instance(args.x, i);
  own.mean = from_channel(args.mean, c);
  own.var = from_channel(args.var, c);
  return own;
}

template <typename scalar_t>
LocalForwardArgs<scalar_t> of_instance(const LocalForwardArgs<scalar_t>& args, int64_t i) {
  const int64_t c = i * args.extent.channels;
  LocalForwardArgs<scalar_t> own = args;
  own.extent.instances = 1;
  own.x = from_instance(args.x, i);
  own.z = from_instance(args.z, i);
  own.mean = from_channel(args.mean, c);
  own.var = from_channel(args.var, c);
  own.affine = from_channel(args.affine, c);
  own.running = from_channel(args.running, c);
  own.residual = from_instance(args.residual, i);
  own.verbatim = from_instance(args.verbatim, i, args.extent.channels);
  return own;
}

template <typename scalar_t>
BackwardReduceArgs<scalar_t> of_instance(const BackwardReduceArgs<scalar_t>& args, int64_t i) {
  const int64_t c = i * args.extent.channels;
  BackwardReduceArgs<scalar_t> own = args;
  own.extent.instances = 1;
  own.z = from_instance(args.z, i);
  own.dz = from_instance(args.dz, i);
  own.xhat = from_instance(args.xhat, i);
  own.dy = from_instance(args.dy, i);
  own.affine = from_channel(args.affine, c);
  own.sum_dy = from_channel(args.sum_dy, c);
  own.sum_xhat_dy = from_channel(args.sum_xhat_dy, c);
  own.residual = from_instance(args.residual, i);
  own.verbatim = from_instance(args.verbatim, i, args.extent.channels);
  return own;
}

template <typename scalar_t>
VerbatimGradientArgs<scalar_t> of_instance(const VerbatimGradientArgs<scalar_t>& args, int64_t i) {
  VerbatimGradientArgs<scalar_t> own = args;
  own.extent.instances = 1;
  own.dz = from_instance(args.dz, i);
  own.affine = from_channel(args.affine, i * args.extent.channels);
  own.residual = from_instance(args.residual, i);
  own.verbatim = from_instance(args.verbatim, i, args.extent.channels);
  own.dy = from_instance(args.dy, i);
  return own;
}

template <typename scalar_t>
LocalBackwardArgs<scalar_t> of_instance(const LocalBackwardArgs<scalar_t>& args, int64_t i) {
  const int64_t c = i * args.extent.channels;
  LocalBackwardArgs<scalar_t> own = args;
  own.extent.instances = 1;
  own.z = from_instance(args.z, i);
  own.dz = from_instance(args.dz, i);
  own.dx = from_instance(args.dx, i);
  own.var = from_channel(args.var, c);
  own.affine = from_channel(args.affine, c);
  own.dweight = from_channel(args.dweight, c);
  own.dbias = from_channel(args.dbias, c);
  own.residual = from_instance(args.residual, i);
  own.dresidual = from_instance(args.dresidual, i);
  own.xhat = from_instance(args.xhat, i);
  own.verbatim = from_instance(args.verbatim, i, args.extent.channels);
  return own;
}

// --- Backends --------------------------------------------------------------------------------------------------------

#define INPLACE_ABN_DECLARE_KERNELS(backend)                          \
  namespace backend {                                                 \
  template <typename scalar_t>                                        \
  void statistics(const StatisticsArgs<scalar_t>& args);              \
  template <typename scalar_t>                                        \
  void combine(const CombineArgs<scalar_t>& args);                    \
  template <typename scalar_t>                                        \
  void forward(const ForwardArgs<scalar_t>& args);                    \
  template <typename scalar_t>                                        \
  void local_forward(const LocalForwardArgs<scalar_t>& args);         \
  template <typename scalar_t>                                        \
  void backward_reduce(const BackwardReduceArgs<scalar_t>& args);     \
  template <typename scalar_t>                                        \
  void backward(const BackwardArgs<scalar_t>& args);                  \
  template <typename scalar_t>                                        \
  void verbatim_gradient(const VerbatimGradientArgs<scalar_t>& args); \
  template <typename scalar_t>                                        \
  void local_backward(const LocalBackwardArgs<scalar_t>& args);       \
  template <typename scalar_t>                                        \
  void group_statistics(const StatisticsArgs<scalar_t>& args);        \
  template <typename scalar_t>                                        \
  void share_sums(const ShareArgs<scalar_t>& args);                   \
  template <typename scalar_t>                                        \
  void inverse(const InverseArgs<scalar_t>& args);                    \
  template <typename scalar_t>                                        \
  void rows_backward(const RowsBackwardArgs<scalar_t>& args);         \
  }

INPLACE_ABN_DECLARE_KERNELS(cpu)
INPLACE_ABN_DECLARE_KERNELS(cuda)

#undef INPLACE_ABN_DECLARE_KERNELS

// Kernels are templates defined in src/; every backend instantiates them for these types of x, or for the one for which
// a source is compiled.
#if defined(INPLACE_ABN_TYPE)
#define INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE) INSTANTIATE(INPLACE_ABN_TYPE)
#else
#define INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE) \
  INSTANTIATE(double)                          \
  INSTANTIATE(float)                           \
  INSTANTIATE(c10::BFloat16)                   \
  INSTANTIATE(c10::Half)
#endif

}  // namespace inplace_abn
