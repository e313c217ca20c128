// Stands in for CUDA's cooperative groups, as far as src/kernels/cuda uses them.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

struct cluster_group {
  unsigned num_blocks() const { return ::emulation::cluster_size(); }
  unsigned block_rank() const { return ::emulation::block_rank(); }
  void sync_at(::emulation::Site site) const { ::emulation::synchronise_cluster(site); }
  template <typename T>
  T* map_shared_rank(T* address, unsigned rank) const {
    return static_cast<T*>(::emulation::map_shared(address, rank));
  }
};

inline cluster_group this_cluster() {
  return {};
}

}  // namespace cooperative_groups

// Barriers are told apart by where they are.
#define sync() sync_at(EMULATION_SITE)
