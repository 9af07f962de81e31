#pragma once

#include "core/operations/forward.h"
#include "dlattn/backward.h"

namespace dlattn::core {

// A tensor of the call of forward(), whose table has its dimensions and sizes.
constexpr Operand of_forward(std::string_view name, int traits = 0) {
  Operand operand = *find(kForwardOperands, name);
  operand.offset = static_cast<std::uint16_t>(offsetof(BackwardParams, forward) + operand.offset);
  operand.c_offset = 0;
  operand.traits = static_cast<std::uint16_t>(traits);
  return operand;
}

#define FIELD(kind, name) DLATTN_FIELD(kind, BackwardParams, DlattnBackward, name)

constexpr Operand kBackwardOperands[] = {
    of_forward("q", kRequired),
    of_forward("k", kRequired),
    of_forward("v", kRequired),
    of_forward("out", kRequired),
    of_forward("lse", kRequired),
    of_forward("bias"),
    of_forward("mask"),
    of_forward("alibi_slopes"),
    of_forward("sinks"),
    of_forward("cu_seqlens_q"),
    of_forward("cu_seqlens_k"),
    of_forward("seqused_k"),
    {FIELD(kTensor, dout), "BSh e"},
    {FIELD(kTensor, dlse), "BhS", Elements::kFloat32},

    {FIELD(kTensor, dq), "BSh d", Elements::kAny, kWritten},
    {FIELD(kTensor, dk), "CTg d", Elements::kAny, kWritten},
    {FIELD(kTensor, dv), "CTg e", Elements::kAny, kWritten},
    {FIELD(kTensor, dbias), "bhst", Elements::kAny, kWritten | kSummed},
    {FIELD(kTensor, dalibi_slopes), "bh", Elements::kFloat32, kWritten | kSummed},
    {FIELD(kTensor, dsinks), "h", Elements::kFloat32, kWritten},
    of_forward("workspace", kWritten),
};
#undef FIELD

inline Operands operands_of(const BackwardParams&) {
  return kBackwardOperands;
}

inline Sizes sizes_of(const BackwardParams& p) {
  return sizes_of(p.forward);
}

}  // namespace dlattn::core
