#pragma once

#include <cstdint>
#include <string_view>

// Whose gradients torch's operators of attention get where nobody asked for either. It needs no
// torch and no GPU: tests ask it about plans for made-up ones.
namespace dlattn::python {

// torch's own kernels of CUDA, in whose place dlattn's may compute gradients.
enum class TorchKernel { kFlash, kEfficient, kCudnn };
constexpr std::string_view kTorchKernels[] = {"flash", "efficient", "cudnn"};

// A backward call: the kernel that dlattn's plan takes for it, and what the comparison rests on.
struct GradientCall {
  std::string_view kernel;
  bool has_bias = false;
  bool wants_dbias = false;
  bool deterministic = false;
  std::int64_t seqlen_q = 0;
  std::int64_t head_dim = 0;
};

// Whether dlattn's gradients were at least as fast as those of torch's kernel, on an H200: see
// research/steps/h200-backward-peers.{1,2}.json and h200-backward-score-mod.json. Factors are
// torch's time over dlattn's. Other GPUs have not been measured: on them wmma, which has the
// instructions of torch's kernels, is taken where it was the faster one on the H200.
constexpr bool is_as_fast(const GradientCall& call, TorchKernel torchs) {
  if (call.kernel == "sm90") {
    switch (torchs) {
      case TorchKernel::kFlash:      // 1.38 to 1.74
      case TorchKernel::kEfficient:  // 2.0 to 9.5, with a bias 3.1 to 7.6, with dbias 2.4 to 3.3
        return true;
      case TorchKernel::kCudnn:
        // 1.05 to 1.24 at head_dim 64, 1.07 to 1.16 with up to 512 queries, else 0.95 to 1.08.
        return !call.deterministic && (call.head_dim <= 64 || call.seqlen_q <= 512);
    }
  }
  if (call.kernel == "wmma") {
    // 0.5 to 1.15 of flash-attention and 0.36 to 0.78 of cuDNN. Of memory-efficient attention 1.3
    // to 3.4, deterministic too, with a bias 1.2 to 2.7, with dbias 0.5 to 0.8.
    return torchs == TorchKernel::kEfficient && !call.wants_dbias &&
           !(call.has_bias && call.deterministic);
  }
  return false;
}

}  // namespace dlattn::python
