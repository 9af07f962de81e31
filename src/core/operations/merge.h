#pragma once

#include "core/operations/operand.h"
#include "dlattn/c.h"
#include "dlattn/merge.h"

namespace dlattn::core {

#define FIELD(kind, name) DLATTN_FIELD(kind, MergeParams, DlattnMerge, name)

constexpr Operand kMergeOperands[] = {
    FIELD(kCount, batch_size),
    FIELD(kLength, seqlen_q),
    FIELD(kCount, num_heads).at_least(1),
    FIELD(kCount, head_dim_v).called("head_dim of outs").at_least(1),

    DLATTN_FIELD_OF_CPP(kTensors, MergeParams, outs).with("BSh e").required(),
    DLATTN_FIELD_OF_CPP(kTensors, MergeParams, lses).with("BhS", Elements::kFloat32).required(),

    FIELD(kTensor, out).with("BSh e").written().required(),
    FIELD(kTensor, lse).with("Bh S", Elements::kFloat32).written().required(),
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
