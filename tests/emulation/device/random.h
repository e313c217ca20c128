#pragma once

#include <cstdint>
#include <utility>

namespace emulation {

// SplitMix64: small, fast, and the same on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t below(uint64_t bound) { return static_cast<uint64_t>(static_cast<unsigned __int128>(next()) * bound >> 64); }

  template <typename Values>
  void shuffle(Values& values) {
    for (auto i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

 private:
  uint64_t state_;
};

// Of the running launch.
extern Random launch_random;

}  // namespace emulation
