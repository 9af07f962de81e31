#pragma once

#include "core/operations/forward.h"
#include "dlattn/backward.h"

namespace dlattn::core {

// Tensors of the call of forward() are read; its own table has its sizes.
#define OF_FORWARD(kind, name) #name, Kind::kind, offsetof(BackwardParams, forward.name), 0
#define FIELD(kind, name) DLATTN_FIELD(kind, BackwardParams, DlattnBackward, name)

constexpr Operand kBackwardOperands[] = {
    {OF_FORWARD(kTensor, q), "BSh d", Elements::kAny, kRequired},
    {OF_FORWARD(kTensor, k), "CTg d", Elements::kAny, kRequired},
    {OF_FORWARD(kTensor, v), "CTg e", Elements::kAny, kRequired},
    {OF_FORWARD(kTensor, out), "BSh e", Elements::kAny, kRequired},
    {OF_FORWARD(kTensor, lse), "Bh S", Elements::kFloat32, kRequired},
    {OF_FORWARD(kTensor, bias), "bhst"},
    {OF_FORWARD(kTensor, mask), "bhst", Elements::kBool},
    {OF_FORWARD(kTensor, alibi_slopes), "bh", Elements::kFloat32},
    {OF_FORWARD(kTensor, sinks), "h", Elements::kFloat32},
    {OF_FORWARD(kList, cu_seqlens_q), " o", Elements::kInt32},
    {OF_FORWARD(kList, cu_seqlens_k), " o", Elements::kInt32},
    {OF_FORWARD(kList, seqused_k), " b", Elements::kInt32},
    {FIELD(kTensor, dout), "BSh e"},
    {FIELD(kTensor, dlse), "BhS", Elements::kFloat32},

    {FIELD(kTensor, dq), "BSh d", Elements::kAny, kWritten},
    {FIELD(kTensor, dk), "CTg d", Elements::kAny, kWritten},
    {FIELD(kTensor, dv), "CTg e", Elements::kAny, kWritten},
    {FIELD(kTensor, dbias), "bhst", Elements::kAny, kWritten | kSummed},
    {FIELD(kTensor, dalibi_slopes), "bh", Elements::kFloat32, kWritten | kSummed},
    {FIELD(kTensor, dsinks), "h", Elements::kFloat32, kWritten},
    {OF_FORWARD(kList, workspace), " w", Elements::kByte, kWritten},
};
#undef FIELD
#undef OF_FORWARD

inline Operands operands_of(const BackwardParams&) {
  return kBackwardOperands;
}

inline Sizes sizes_of(const BackwardParams& p) {
  return sizes_of(p.forward);
}

}  // namespace dlattn::core
