// What one element, or one byte of shared memory, has seen of the threads that access it.
#pragma once

#include <cstdint>

#include "grid.h"

namespace emulation {

class Cell {
 public:
  // The other thread with which an access of `now` is a race, or null. Blocks before `first_block` belong to earlier
  // launches, after which everything is ordered.
  const Moment* race(bool writes, uint32_t first_block) const {
    if (unordered(write_, first_block)) return &write_;
    if (!writes) return nullptr;
    if (unordered(read_, first_block)) return &read_;
    if (elsewhere_.block >= first_block && elsewhere_.block != 0) return &elsewhere_;
    return nullptr;
  }

  void note(bool writes, uint32_t first_block) {
    if (writes) {
      write_ = now;
      written_ = true;
    } else if (read_.block != now.block) {
      if (read_.block >= first_block) elsewhere_ = read_;
      read_ = now;
    } else if (read_.barriers != now.barriers) {
      read_ = now;
    } else if (read_.thread != now.thread) {
      // Several threads have read it since the last barrier: whoever writes it is another than one of them.
      read_.thread = several;
    }
  }

  bool written() const { return written_; }
  void set_written(bool value) { written_ = value; }

 private:
  static constexpr uint16_t several = 0xffff;

  static bool unordered(const Moment& other, uint32_t first_block) {
    if (other.block < first_block || other.block == 0) return false;
    if (other.block != now.block) return true;
    return other.barriers == now.barriers && other.thread != now.thread;
  }

  Moment write_{}, read_{}, elsewhere_{};
  bool written_ = true;
};

}  // namespace emulation
