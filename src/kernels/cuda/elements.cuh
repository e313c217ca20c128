// What the kernels of both memory orders share: the interface of an op, and how elements get in and out.
//
// An op declares
//   scalar_t, opmath_t
//   inputs                    tensors read
//   outputs, needed_outputs   tensors written; those past the needed ones may be null and then are not
//   unroll, at_once           items a thread has in flight; whether it takes them up all at once or one by one
//   much_arithmetic           whether it needs many registers for intermediate results
//   Channel, channel(c)       what an element needs to know of its channel
//   reduces, Sum              whether a channel is reduced, and what a thread sums up towards it
//   totals(channel, sum, count)  what `count` elements of a thread add to the channel's totals
//   finish(c, totals)         stores what comes of the totals of all of channel c
//   tile<items, width>(channel, in, out, sum, tile)
//                             the work: `width` elements of one channel from each of `items` items. `sum` takes up
//                             those that the tile `has`; the others are zero, and what becomes of them is dropped.
//
// Outputs may be the memory of inputs (kernels.h). A thread loads its elements from all inputs before it stores any of
// their outputs, and no other thread touches these elements. Pointers are not `__restrict__`, and loads are plain,
// never through the read-only path (`__ldg`), which may not see stores of the same kernel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "partition.h"
#include "reduction.cuh"

namespace inplace_abn::cuda {

template <typename scalar_t>
struct Streams {
  View<const scalar_t> in[3];
  View<scalar_t> out[2];
};

template <typename scalar_t, int streams, int elements>
using Elements = scalar_t[streams == 0 ? 1 : streams][elements];

// Which elements of an item there are: bit i for element i.
using Mask = uint32_t;

template <int width>
constexpr Mask all_elements = (Mask(1) << width) - 1;

// `items` items, `width` elements each as far as their masks say, at least one in all; the thread's `first` or not.
template <int items, int width>
struct Tile {
  const Mask* masks;
  bool first;

  __device__ __forceinline__ bool has(int e) const { return (masks[e / width] >> (e % width) & 1) != 0; }
  __device__ __forceinline__ int elements() const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) sum += __popc(masks[i]);
    return sum;
  }
};

// Activations that take more than a multiplication. They are bound by arithmetic rather than by memory.
template <typename Act>
constexpr bool heavy = true;
template <typename scalar_t>
constexpr bool heavy<Identity<scalar_t>> = false;
template <typename scalar_t>
constexpr bool heavy<LeakyRelu<scalar_t>> = false;
template <typename scalar_t>
constexpr bool heavy<Relu<scalar_t>> = false;
template <typename scalar_t>
constexpr bool heavy<PlainRelu<scalar_t>> = false;

// Blocks that a multiprocessor holds at least, which bounds the registers of a thread: 3 blocks to 80; 4 to 64, where a
// reduction stores nothing and needs no more, because loads are all that it waits for; 2 to 128, which is what doubles
// need, five streams, reductions of 16 bits that store or do much arithmetic, and the values of many channels with
// three streams or much arithmetic.
template <typename Op, int channels>
constexpr bool wide = [] {
  if (channels > 4) return Op::inputs > 2 || Op::outputs > 1 || Op::much_arithmetic;
  constexpr bool is_16_bit = sizeof(typename Op::scalar_t) == 2;
  const bool reduces_much = Op::reduces && is_16_bit && (Op::outputs > 0 || Op::much_arithmetic);
  return Op::inputs + Op::outputs > 4 || reduces_much;
}();
// Statistics keep three values of each channel.
template <typename Op, int channels>
constexpr bool narrow =
    Op::reduces && Op::outputs == 0 && Op::inputs < 3 && !Op::much_arithmetic && (channels == 1 || !Op::at_once);
template <typename Op, int channels>
constexpr int resident = sizeof(typename Op::opmath_t) == sizeof(double) || wide<Op, channels> ? 2
                         : narrow<Op, channels>                                                ? 4
                                                                                               : 3;

// Blocks that the current device holds.
template <typename Op, int channels>
int64_t residency() {
  return multiprocessors() * resident<Op, channels>;
}

template <typename scalar_t>
constexpr int vector_width = 16 / sizeof(scalar_t);

// `width` elements: one, or 16 bytes, which stay packed in four registers from the load to their use.
template <typename scalar_t, int width>
struct alignas(16) Vector {
  uint32_t words[4];

  __device__ __forceinline__ scalar_t get(int i) const {
    scalar_t value;
    if constexpr (sizeof(scalar_t) == 2) {
      const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      memcpy(&value, &bits, sizeof(value));
    } else {
      memcpy(&value, words + i * (sizeof(scalar_t) / 4), sizeof(value));
    }
    return value;
  }
  __device__ __forceinline__ void set(int i, scalar_t value) {
    if constexpr (sizeof(scalar_t) == 2) {
      uint16_t bits;
      memcpy(&bits, &value, sizeof(value));
      const int shift = i % 2 * 16;
      words[i / 2] = (words[i / 2] & ~(0xffffu << shift)) | (static_cast<uint32_t>(bits) << shift);
    } else {
      memcpy(words + i * (sizeof(scalar_t) / 4), &value, sizeof(value));
    }
  }
  __device__ __forceinline__ void load(const scalar_t* from) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    memcpy(words, &raw, sizeof(raw));
  }
  __device__ __forceinline__ void store(scalar_t* to) const {
    // A plain store; compilers do not always see that these four words are one access.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
};

template <typename scalar_t>
struct Vector<scalar_t, 1> {
  scalar_t value;

  __device__ __forceinline__ scalar_t get(int) const { return value; }
  __device__ __forceinline__ void set(int, scalar_t to) { value = to; }
  __device__ __forceinline__ void load(const scalar_t* from) { value = *from; }
  __device__ __forceinline__ void store(scalar_t* to) const { *to = value; }
};

// An item: a vector per stream.
template <typename scalar_t, int width, int streams>
using Item = Vector<scalar_t, width>[streams == 0 ? 1 : streams];

// Each stream's vector from, or to, where `at` says that it lies in a view.
template <typename Op, int width, typename At>
__device__ __forceinline__ void load(const Streams<typename Op::scalar_t>& io, const At& at,
                                     Item<typename Op::scalar_t, width, Op::inputs>& in) {
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) in[k].load(at(io.in[k]));
}

template <typename Op, int width, typename At>
__device__ __forceinline__ void store(const Streams<typename Op::scalar_t>& io, const At& at,
                                      const Item<typename Op::scalar_t, width, Op::outputs>& out) {
#pragma unroll
  for (int k = 0; k < Op::outputs; ++k) {
    if (k < Op::needed_outputs || io.out[k].data != nullptr) out[k].store(at(io.out[k]));
  }
}

// The same for an item of which there may be a part only: missing elements are read as zero, and not written.
template <typename Op, int width, typename At>
__device__ __forceinline__ void load_part(const Streams<typename Op::scalar_t>& io, const At& at, Mask mask,
                                          Item<typename Op::scalar_t, width, Op::inputs>& in) {
  if (mask == all_elements<width>) {
    load<Op, width>(io, at, in);
  } else if constexpr (width > 1) {
    if (mask == 0) return;
#pragma unroll
    for (int k = 0; k < Op::inputs; ++k) {
      const auto* from = at(io.in[k]);
      in[k] = {};
#pragma unroll
      for (int i = 0; i < width; ++i) {
        if ((mask >> i & 1) != 0) in[k].set(i, from[i]);
      }
    }
  }
}

template <typename Op, int width, typename At>
__device__ __forceinline__ void store_part(const Streams<typename Op::scalar_t>& io, const At& at, Mask mask,
                                           const Item<typename Op::scalar_t, width, Op::outputs>& out) {
  if (mask == all_elements<width>) {
    store<Op, width>(io, at, out);
  } else if constexpr (width > 1) {
#pragma unroll
    for (int k = 0; k < Op::outputs; ++k) {
      if (k >= Op::needed_outputs && io.out[k].data == nullptr) continue;
      auto* to = at(io.out[k]);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        if ((mask >> i & 1) != 0) to[i] = out[k].get(i);
      }
    }
  }
}

// Hands elements `at ... at + elements - 1` of each of `items` items to the op.
template <int items, int elements, int width, typename Op>
__device__ __forceinline__ void take(const Op& op, const typename Op::Channel& channel,
                                     const Item<typename Op::scalar_t, width, Op::inputs>* in,
                                     Item<typename Op::scalar_t, width, Op::outputs>* out, int at,
                                     typename Op::Sum& sum, const Tile<items, elements>& tile) {
  Elements<typename Op::scalar_t, Op::inputs, items * elements> all_in;
  Elements<typename Op::scalar_t, Op::outputs, items * elements> all_out;
#pragma unroll
  for (int e = 0; e < items * elements; ++e) {
#pragma unroll
    for (int k = 0; k < Op::inputs; ++k) all_in[k][e] = in[e / elements][k].get(at + e % elements);
  }
  op.template tile<items, elements>(channel, all_in, all_out, sum, tile);
#pragma unroll
  for (int e = 0; e < items * elements; ++e) {
#pragma unroll
    for (int k = 0; k < Op::outputs; ++k) out[e / elements][k].set(at + e % elements, all_out[k][e]);
  }
}

// Calls f(view) for all tensors of a call that exist.
template <typename scalar_t, typename F>
void for_each_view(const Streams<scalar_t>& io, const F& f) {
  for (const auto& view : io.in) {
    if (view.data != nullptr) f(view);
  }
  for (const auto& view : io.out) {
    if (view.data != nullptr) f(view);
  }
}

}  // namespace inplace_abn::cuda
