#pragma once

#include "core/operations/tensors.h"
#include "dlattn/attention.h"

namespace dlattn::core {

// Each throws UnsupportedError if what a call writes shares memory with another tensor of the call:
// with one that it reads, whatever that is for, or with another one that it writes. Nothing that a
// pointer of the parameters points to is read.
void check_own_memory(const GivenTensors& tensors);
// The same for append_kv(), where views of one pool may be both caches, and q_out may be q.
void check_own_memory(const AppendParams& params, const GivenTensors& tensors);

// The same of two calls that are made as one, between the tensors of one and those of the other:
// of each for itself it is checked before. `attention` reads the caches that `append` writes, and
// the queries that it rotates.
void check_own_memory(const AppendParams& append, const AttentionParams& attention);

// The same of a call's workspace alone, the last tensor of its table.
void check_workspace_memory(const AttentionParams& params);
void check_workspace_memory(const BackwardParams& params);

}  // namespace dlattn::core
