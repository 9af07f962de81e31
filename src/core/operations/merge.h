#pragma once

#include "core/operations/operand.h"
#include "core/operations/operation.h"
#include "dlattn/c.h"
#include "dlattn/merge.h"

namespace dlattn {

inline DType dtype_of(const MergeParams& p) {
  return p.out.dtype;
}
inline core::HeadDims head_dims_of(const MergeParams& p) {
  return {{"head_dim of outs", p.head_dim_v}, {"head_dim of outs", p.head_dim_v}};
}

namespace cpu {
void merge_states(const MergeParams& params, Poll poll = {});
}

}  // namespace dlattn

namespace dlattn::core {

void validate(const MergeParams& params);  // validate_merge.cpp

#define FIELD(kind, name) DLATTN_FIELD(kind, MergeParams, DlattnMerge, name)

constexpr Operand kMergeOperands[] = {
    {FIELD(kCount, batch_size)},
    {FIELD(kLength, seqlen_q)},
    {FIELD(kCount, num_heads), 1},
    {DLATTN_FIELD_AS("head_dim of outs", kCount, MergeParams, DlattnMerge, head_dim_v), 1},

    {DLATTN_FIELD_OF_CPP(kTensors, MergeParams, outs), "BSh e", Elements::kAny, kRequired},
    {DLATTN_FIELD_OF_CPP(kTensors, MergeParams, lses), "BhS", Elements::kFloat32, kRequired},

    {FIELD(kTensor, out), "BSh e", Elements::kAny, kRequired | kWritten},
    {FIELD(kTensor, lse), "Bh S", Elements::kFloat32, kRequired | kWritten},
};
#undef FIELD

inline Operands operands_of(const MergeParams&) {
  return kMergeOperands;
}

inline Sizes sizes_of(const MergeParams& p) {
  Sizes sizes;
  sizes['N'] = p.num_states;
  sizes['B'] = p.batch_size, sizes['S'] = p.seqlen_q;
  sizes['h'] = p.num_heads, sizes['e'] = p.head_dim_v;
  return sizes;
}

}  // namespace dlattn::core
