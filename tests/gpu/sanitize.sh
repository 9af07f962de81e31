#!/usr/bin/env bash
# Runs the short GPU suite under each tool of compute-sanitizer. Needs a GPU and the CUDA toolkit.
#   tests/gpu/sanitize.sh [build folder]
set -euo pipefail
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:-$(mktemp -d)}

cmake -S "$source_dir" -B "$build" -DDLATTN_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES="${CUDAARCHS:-native}" >/dev/null
cmake --build "$build" --target gpu_short_suite -j "$(nproc)" >/dev/null
suite=$(find "$build" -name gpu_short_suite -type f)

"$suite"
for tool in memcheck racecheck synccheck initcheck; do
  echo "== $tool"
  options=()
  # It reports races that are none: it loses sight of __syncthreads beside barriers of part of a block (split_kernel,
  # wide_kernel: see named_barriers.cu), and of an order that comes by a producer's warp and its copies (sm90_latent).
  # ThreadSanitizer sees these kernels in tests/simt.
  if [ "$tool" = racecheck ]; then options=(--kernel-name-exclude kns=split_kernel,kns=wide_kernel,kns=sm90_latent); fi
  compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 1 --print-limit 5 "$suite"
done
