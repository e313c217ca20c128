// Where dispatch.cpp finds its CPU backend: the CUDA kernels, run on the emulated device, which is told what memory
// each op may read and write.

#include <mutex>
#include <stdexcept>

#include "access.h"
#include "inplace_abn/kernels.h"

namespace inplace_abn {
namespace {

using emulation::use_both;
using emulation::use_read;
using emulation::use_write;

// One op at a time: what it may access is the process's.
class Call {
 public:
  Call(const Extent& extent) : lock_(mutex()), extent_(extent) { emulation::begin_call(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { emulation::end_call(); }

  template <typename scalar_t>
  Call& view(const char* name, const View<scalar_t>& view, unsigned uses) {
    return view_of(name, view, extent_.channels, uses);
  }
  // What is saved of some channels. Where channels of several samples count on, all of these have saved some.
  template <typename scalar_t>
  Call& verbatim(const Verbatim<scalar_t>& verbatim, unsigned uses) {
    if (!verbatim) return *this;
    vector("rows", verbatim.rows, verbatim.channels, use_read);
    view_of("saved xhat", verbatim.xhat, saved_rows(verbatim), uses);
    return view_of("saved dy", verbatim.dy, saved_rows(verbatim), use_read);
  }
  // A view like that of the saved xhat.
  template <typename scalar_t, typename T>
  Call& like_verbatim(const char* name, const View<T>& view, const Verbatim<scalar_t>& verbatim, unsigned uses) {
    return view_of(name, view, saved_rows(verbatim), uses);
  }
  // Vectors that an op returns are its own, and fresh.
  template <typename T>
  Call& vector(const char* name, T* data, int64_t count, unsigned uses) {
    const bool fresh = uses != use_read;
    emulation::add_area({name, data, sizeof(T), {{count, 1}}, fresh ? use_both : use_read, fresh});
    return *this;
  }
  // Vectors that an op has made and goes on with.
  template <typename T>
  Call& changed(const char* name, T* data, int64_t count) {
    emulation::add_area({name, data, sizeof(T), {{count, 1}}, use_both});
    return *this;
  }
  template <typename scalar_t>
  Call& channels(const char* name, const ChannelVector<scalar_t>& vector, unsigned uses) {
    const int64_t bytes = vector.narrow ? sizeof(scalar_t) : sizeof(opmath_type<scalar_t>);
    emulation::add_area({name, vector.data, bytes, {{extent_.channels, 1}}, uses});
    return *this;
  }
  template <typename scalar_t>
  Call& affine(const Affine<scalar_t>& affine) {
    return channels("weight", affine.weight, use_read).channels("bias", affine.bias, use_read);
  }
  template <typename scalar_t>
  Call& running(const RunningUpdate<scalar_t>& running) {
    channels("running_mean", running.mean, use_both).channels("running_var", running.var, use_both);
    return vector("momentum", running.momentum_tensor, 1, use_read);
  }

 private:
  template <typename scalar_t>
  Call& view_of(const char* name, const View<scalar_t>& view, int64_t channels, unsigned uses) {
    emulation::add_area({name,
                         view.data,
                         sizeof(scalar_t),
                         {{extent_.batch, view.batch_stride}, {channels, view.channel_stride}, {extent_.space, 1}},
                         uses});
    return *this;
  }
  template <typename scalar_t>
  int64_t saved_rows(const Verbatim<scalar_t>& verbatim) const {
    const int64_t channels = verbatim.first + extent_.channels;
    return channels == 0 ? 0 : (channels + verbatim.channels - 1) / verbatim.channels * verbatim.saved;
  }
  static std::mutex& mutex() {
    static std::mutex value;
    return value;
  }

  std::lock_guard<std::mutex> lock_;
  Extent extent_;
};

}  // namespace

namespace cpu {

template <typename scalar_t>
void statistics(const StatisticsArgs<scalar_t>& args) {
  Call call(args.extent);
  const int64_t channels = args.extent.channels;
  call.view("x", args.x, use_read).vector("mean", args.mean, channels, use_write);
  call.vector("var", args.var, channels, use_write);
  cuda::statistics(args);
}

template <typename scalar_t>
void combine(const CombineArgs<scalar_t>& args) {
  Call call(Extent{Order::rows, 0, args.channels, 1});
  call.vector("gathered", args.gathered, args.parts * (2 * args.channels + 1), use_read);
  call.vector("mean", args.mean, args.channels, use_write).vector("var", args.var, args.channels, use_write);
  call.vector("count", args.count, 1, use_write).running(args.running);
  cuda::combine(args);
}

template <typename scalar_t>
void forward(const ForwardArgs<scalar_t>& args) {
  Call call(args.extent);
  call.view("x", args.x, use_read).view("z", args.z, use_write).view("residual", args.residual, use_read);
  call.channels("mean", args.mean, use_read).channels("var", args.var, use_read).affine(args.affine);
  call.verbatim(args.verbatim, use_write);
  cuda::forward(args);
}

template <typename scalar_t>
void local_forward(const LocalForwardArgs<scalar_t>& args) {
  Call call(args.extent);
  const int64_t channels = args.extent.channels;
  call.view("x", args.x, use_read).view("z", args.z, use_write).view("residual", args.residual, use_read);
  call.vector("mean", args.mean, channels, use_write).vector("var", args.var, channels, use_write);
  call.affine(args.affine).running(args.running).verbatim(args.verbatim, use_write);
  cuda::local_forward(args);
}

template <typename scalar_t>
void backward_reduce(const BackwardReduceArgs<scalar_t>& args) {
  Call call(args.extent);
  const int64_t channels = args.extent.channels;
  call.view("z", args.z, use_read).view("dz", args.dz, use_read).view("residual", args.residual, use_read);
  // The dy of channels whose xhat is saved is read once more.
  call.view("xhat", args.xhat, use_write).view("dy", args.dy, args.verbatim ? use_both : use_write);
  call.affine(args.affine).verbatim(args.verbatim, use_read);
  call.vector("sum_dy", args.sum_dy, channels, use_write).vector("sum_xhat_dy", args.sum_xhat_dy, channels, use_write);
  cuda::backward_reduce(args);
}

template <typename scalar_t>
void backward(const BackwardArgs<scalar_t>& args) {
  Call call(args.extent);
  const int64_t channels = args.extent.channels;
  call.view("xhat", args.xhat, use_read).view("dy", args.dy, use_read).view("dx", args.dx, use_write);
  call.channels("var", args.var, use_read).affine(args.affine);
  call.vector("mean_dy", args.mean_dy, channels, use_read);
  call.vector("mean_xhat_dy", args.mean_xhat_dy, channels, use_read);
  cuda::backward(args);
}

template <typename scalar_t>
void verbatim_gradient(const VerbatimGradientArgs<scalar_t>& args) {
  Call call(args.extent);
  call.view("dz", args.dz, use_read).view("residual", args.residual, use_read).affine(args.affine);
  call.verbatim(args.verbatim, use_read).like_verbatim("dy", args.dy, args.verbatim, use_write);
  cuda::verbatim_gradient(args);
}

template <typename scalar_t>
void local_backward(const LocalBackwardArgs<scalar_t>& args) {
  Call call(args.extent);
  call.view("z", args.z, use_read).view("dz", args.dz, use_read).view("residual", args.residual, use_read);
  // With memory for xhat, dy waits for its second pass where it will be overwritten, or is wanted.
  const auto use = args.xhat.data == nullptr ? use_write : use_both;
  call.view("dx", args.dx, use).view("dresidual", args.dresidual, use).view("xhat", args.xhat, use_both);
  call.channels("var", args.var, use_read).affine(args.affine);
  call.channels("dweight", args.dweight, use_write).channels("dbias", args.dbias, use_write);
  cuda::local_backward(args);
}

template <typename scalar_t>
void group_statistics(const StatisticsArgs<scalar_t>& args) {
  Call call(args.extent);
  const int64_t channels = args.extent.channels;
  call.view("x", args.x, use_read).vector("mean", args.mean, channels, use_write);
  call.vector("var", args.var, channels, use_write);
  cuda::group_statistics(args);
}

template <typename scalar_t>
void share_sums(const ShareArgs<scalar_t>& args) {
  Call call(args.extent);
  const int64_t channels = args.extent.channels;
  call.changed("sum_dy", args.sum_dy, channels).changed("sum_xhat_dy", args.sum_xhat_dy, channels);
  call.affine(args.affine).channels("dweight", args.dweight, use_write).channels("dbias", args.dbias, use_write);
  cuda::share_sums(args);
}

template <typename scalar_t>
void inverse(const InverseArgs<scalar_t>& args) {
  Call call(Extent{Order::rows, 0, args.count, 1});
  call.vector("z", args.z, args.count, use_read).vector("y", args.y, args.count, use_write);
  cuda::inverse(args);
}

template <typename scalar_t>
void rows_backward(const RowsBackwardArgs<scalar_t>& args) {
  Call call(Extent{Order::rows, args.rows, args.columns, 1});
  const auto area = [&](const char* name, auto* data, unsigned uses) {
    call.view(name, View{data, args.columns, 1}, uses);
  };
  area("y", args.y, use_read);
  area("dy", args.dy, use_read);
  area("dx", args.dx, use_write);
  call.vector("rstd", args.rstd, args.rows, use_read);
  call.channels("weight", args.weight, use_read).channels("bias", args.bias, use_read);
  cuda::rows_backward(args);
}

#define INSTANTIATE(scalar_t)                                             \
  template void statistics(const StatisticsArgs<scalar_t>&);              \
  template void combine(const CombineArgs<scalar_t>&);                    \
  template void forward(const ForwardArgs<scalar_t>&);                    \
  template void local_forward(const LocalForwardArgs<scalar_t>&);         \
  template void backward_reduce(const BackwardReduceArgs<scalar_t>&);     \
  template void backward(const BackwardArgs<scalar_t>&);                  \
  template void verbatim_gradient(const VerbatimGradientArgs<scalar_t>&); \
  template void local_backward(const LocalBackwardArgs<scalar_t>&);       \
  template void group_statistics(const StatisticsArgs<scalar_t>&);        \
  template void share_sums(const ShareArgs<scalar_t>&);                   \
  template void inverse(const InverseArgs<scalar_t>&);                    \
  template void rows_backward(const RowsBackwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace cpu
}  // namespace inplace_abn
