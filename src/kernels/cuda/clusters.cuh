// One launch instead of three, and no second read from device memory: a channel that fits into the shared memory of a
// cluster of blocks is kept there between the reduction and what follows from it. Blocks tell each other their totals
// through distributed shared memory. In units of one activation-sized transfer: 2 forward, 3 backward.
//
// Only for planes that vectors divide evenly, on devices of compute capability 9.0, and where INPLACE_ABN_CUDA_CLUSTERS
// in the environment is 1.
#pragma once

#include <cooperative_groups.h>

#include <cstdlib>
#include <limits>
#include <string_view>

#include "planes.cuh"

namespace inplace_abn::cuda {

constexpr int cluster_threads = 512;

// `application` needs of a channel what `reduction.finish` stores. It is given the inputs that the reduction has read,
// from shared memory, and, where it has more of them, these from device memory.
template <typename Reduction, typename Application, int width>
__global__ void __launch_bounds__(cluster_threads, 1)
    clusters_kernel(const Reduction reduction, const Application application,
                    const Streams<typename Reduction::scalar_t> io, const PlanePartition p) {
#if __CUDA_ARCH__ >= 900
  using scalar_t = typename Reduction::scalar_t;
  using opmath_t = typename Reduction::opmath_t;
  constexpr int kept = Reduction::inputs, unroll = Reduction::unroll;
  static_assert(Application::inputs >= kept && Reduction::outputs == 0);
  extern __shared__ uint4 vectors[];
  __shared__ Totals own;
  const auto cluster = cooperative_groups::this_cluster();
  const int64_t c = quotient(blockIdx.x, p.parts);
  const auto part = static_cast<int32_t>(blockIdx.x - c * p.parts);
  const auto items = static_cast<int32_t>(p.items), slots = static_cast<int32_t>(p.slots);
  const auto tile = static_cast<int32_t>(p.tile), stride = static_cast<int32_t>(p.parts) * tile;
  const auto next_item = p.next_item.template as<int32_t>(), next_tile = p.next_tile.template as<int32_t>();
  const auto start = p.at(part * tile + threadIdx.x).template as<int32_t>();
  // Each thread keeps vectors for itself: number `place` of its own, of input k.
  const auto vector = [&](int place, int k) { return vectors + (place * kept + k) * cluster_threads + threadIdx.x; };

  {
    const ChannelPlanes<Reduction, width, true> planes{io, p, c};
    const auto channel = reduction.channel(c);
    typename Reduction::Sum sum{};
    opmath_t count = 0;
    auto cursor = start;
    int place = 0;
    for (int32_t item = part * tile + threadIdx.x; item < items; item += stride, place += unroll) {
      Item<scalar_t, width, kept> in[unroll];
      Mask mask[unroll];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        mask[u] = item + u * cluster_threads < items ? all_elements<width> : 0;
        planes.load(cursor, mask[u], in[u]);
        cursor.advance(next_item, slots);
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        if (mask[u] == 0) continue;
#pragma unroll
        for (int k = 0; k < kept; ++k) in[u][k].keep(vector(place + u, k));
        Item<scalar_t, width, 0> none[1] = {};
        take<1, width, width>(reduction, channel, in + u, none, 0, sum, Tile<1, width>{mask + u, count == 0});
        count += static_cast<opmath_t>(width);
      }
      cursor.advance(next_tile, slots);
    }
    const Totals merged = merge_block<cluster_threads>(reduction.totals(channel, sum, count));
    if (threadIdx.x == 0) own = merged;
  }
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {
    Totals totals{};
    for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) totals.add(*cluster.map_shared_rank(&own, rank));
    reduction.finish(c, totals);
  }
  // After this all blocks see what was finished. No block ends before the others have read its totals.
  cluster.sync();
  {
    const ChannelPlanes<Application, width, true> planes{io, p, c};
    const auto channel = application.channel(c);
    typename Application::Sum none{};
    auto cursor = start;
    int place = 0;
    for (int32_t item = part * tile + threadIdx.x; item < items; item += stride, place += unroll) {
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const Mask mask[1] = {item + u * cluster_threads < items ? all_elements<width> : 0};
        if (mask[0] != 0) {
          Item<scalar_t, width, Application::inputs> in;
          Item<scalar_t, width, Application::outputs> out[1] = {};
#pragma unroll
          for (int k = 0; k < kept; ++k) in[k].load(reinterpret_cast<const scalar_t*>(vector(place + u, k)));
#pragma unroll
          for (int k = kept; k < Application::inputs; ++k) in[k].load(planes.locate(cursor)(io.in[k]));
          take<1, width, width>(application, channel, &in, out, 0, none, Tile<1, width>{mask, false});
          planes.store(cursor, mask[0], out[0]);
        }
        cursor.advance(next_item, slots);
      }
      cursor.advance(next_tile, slots);
    }
  }
#endif
}

inline bool clusters_are_on() {
  const char* const given = std::getenv("INPLACE_ABN_CUDA_CLUSTERS");
  return given != nullptr && std::string_view(given) == "1";
}

// Runs both ops if channels can be kept, and says whether it did.
template <typename Reduction, typename Application>
bool run_in_clusters(const Extent& extent, const Reduction& reduction, const Application& application,
                     const Streams<typename Reduction::scalar_t>& io) {
  using scalar_t = typename Reduction::scalar_t;
  if constexpr (std::is_same_v<scalar_t, double>) {
    return false;
  } else {
    constexpr int width = vector_width<scalar_t>, vector_bytes = 16, static_bytes = 1024;
    const Device device = current_device();
    if (!clusters_are_on() || !device.has_clusters || extent.order != Order::planes || extent.elements() == 0)
      return false;
    const PlaneAlignment alignment = align_planes<width>(extent, io);
    if (!alignment.even) return false;
    for (const int blocks : {1, 2, 4, 8}) {
      const PlanePartition p =
          partition_cluster(extent, width, Reduction::unroll, alignment.stride, cluster_threads, blocks);
      const int64_t bytes = p.items_of_thread() * cluster_threads * Reduction::inputs * vector_bytes;
      // Of two blocks on a multiprocessor one reads while the other one writes; the largest channels do without.
      const int64_t most = (device.shared_bytes - static_bytes) / (blocks == 8 ? 1 : 2);
      if (bytes > most || !p.fits_32_bits() || p.blocks() > std::numeric_limits<int32_t>::max()) continue;
      launch_clusters(clusters_kernel<Reduction, Application, width>, p.channels, blocks, cluster_threads, bytes,
                      reduction, application, io, p);
      return true;
    }
    return false;
  }
}

}  // namespace inplace_abn::cuda
