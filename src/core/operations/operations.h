#pragma once

// The one list of operations: X(enumerator of Operation, name, type of its parameters). Names in
// texts, the registry, the lists of families and cmake/Instances.cmake, which reads these lines,
// are made from it. A name is a folder of src/cuda, but for combine, whose kernels lie beside those
// that leave partial results.
// clang-format off
#define DLATTN_OPERATIONS(X)            \
  X(kForward, forward, AttentionParams) \
  X(kMerge, merge, MergeParams)         \
  X(kQuantize, quantize, QuantizeTask)  \
  X(kAppend, append, AppendParams)      \
  X(kCombine, combine, CombineTask)     \
  X(kBackward, backward, BackwardParams) \
  X(kDelta, delta, DeltaTask)           \
  X(kReduce, reduce, ReduceTask)
// clang-format on
