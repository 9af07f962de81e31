#pragma once

#include "cuda/tile/wgmma/softmax.cuh"

namespace dlattn::sm90 {

// How large probabilities are that are rounded to 16 bits, in powers of two.
struct HalfRange {
  static constexpr float kMaxSum = 0x1p10f;  // of a lane's, above which a row max is raised
  static constexpr int kFirstExponent = 0;   // of the largest one of a row's first tile
  static constexpr int kSumExponent = 0;     // of a row's sum after it was raised
  static constexpr float kMostScaled = tile::kMostScaled;  // of a scaled row max, by magnitude
  static constexpr bool kToPower = true;  // whether a row max is then where the tile's largest
                                          // probability is a power of two
};

using Softmax = tile::wgmma::RangedSoftmax<HalfRange>;

}  // namespace dlattn::sm90
