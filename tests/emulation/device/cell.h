// What one element, or one byte of shared memory, has seen of the threads that access it.
#pragma once

#include <cstdint>

#include "grid.h"

namespace emulation {

class Cell {
 public:
  // The other thread with which an access of `now` is a race, or null. Clusters before `first` belong to earlier
  // launches, after which everything is ordered.
  const Moment* race(bool writes, uint32_t first) const {
    if (unordered(write_, first)) return &write_;
    if (!writes) return nullptr;
    if (unordered(read_, first)) return &read_;
    if (elsewhere_.cluster >= first && elsewhere_.cluster != 0) return &elsewhere_;
    return nullptr;
  }

  void note(bool writes, uint32_t first) {
    if (writes) {
      write_ = now;
      written_ = true;
    } else if (read_.cluster != now.cluster) {
      if (read_.cluster >= first) elsewhere_ = read_;
      read_ = now;
    } else if (read_.epoch != now.epoch) {
      read_ = now;
    } else if (read_.rank != now.rank) {
      // Several blocks have read it since the cluster's last barrier: whoever writes it is another than one of them.
      read_.rank = several;
    } else if (read_.barriers != now.barriers) {
      read_ = now;
    } else if (read_.thread != now.thread) {
      // Likewise several threads since the block's last barrier.
      read_.thread = several;
    }
  }

  bool written() const { return written_; }
  void set_written(bool value) { written_ = value; }

 private:
  static constexpr uint16_t several = 0xffff;

  static bool unordered(const Moment& other, uint32_t first) {
    if (other.cluster < first || other.cluster == 0) return false;
    if (other.cluster != now.cluster) return true;
    if (other.epoch != now.epoch) return false;
    if (other.rank != now.rank) return true;
    return other.barriers == now.barriers && other.thread != now.thread;
  }

  Moment write_{}, read_{}, elsewhere_{};
  bool written_ = true;
};

}  // namespace emulation
