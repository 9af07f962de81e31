#pragma once

#include <string>

#include "attention_test.h"
#include "cuda/forward/wmma/packing.h"

namespace simt {

// The tests of wmma's kernels, whose rows may be those of all query heads of a KV head.
class WmmaTests : public Tests {
 public:
  using Tests::Tests;

 private:
  void with_folded_heads(const dlattn::AttentionParams& params, const dlattn::Plan& plan,
                         const RunLaunch& run) const override {
    dlattn::wmma::with_folded_heads(params, plan, run);
  }

  // Bits may depend on whether heads are packed.
  std::string variant_of_sequences(const dlattn::Plan& plan) const override {
    return std::string(plan.variant_name) + (plan.packed_heads > 1 ? "+packed" : "+unpacked");
  }
};

}  // namespace simt
