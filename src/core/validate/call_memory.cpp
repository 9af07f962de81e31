// Which tensors of a call may not share memory: the table of its operation tells what it reads and
// what it writes.
#include "core/validate/call_memory.h"

#include <string_view>

#include "core/operations/append.h"
#include "core/operations/backward.h"
#include "core/operations/forward.h"
#include "core/validate/fail.h"

namespace dlattn::core {
namespace {

void check_apart(const GivenTensor& written, const GivenTensor& other) {
  if (disjoint(written.region, other.region)) return;
  fail(written.operand->name, " shares memory with ", other.operand->name,
       "; accepted: memory of its own, or a slice of the same buffer whose strides show that it "
       "has no element in common");
}

// Whether an output is its input.
bool is_in_place(const Region& a, const Region& b) {
  bool same = a.data == b.data;
  for (int dim = 0; dim < 4; ++dim) same &= a.sizes[dim] <= 1 || a.strides[dim] == b.strides[dim];
  return same;
}

// Pairs of a call that may share memory all the same.
bool may_share(const AppendParams& p, const GivenTensor& written, const GivenTensor& other) {
  const std::string_view a = written.operand->name, b = other.operand->name;
  // Views of one pool may overlap in pages: which of these are keys, the table and the slots tell.
  if (a == "k_cache" && b == "v_cache")
    return (p.page_table.data || p.slots) && p.k_cache.data != p.v_cache.data;
  return a == "q_out" && b == "q" && is_in_place(written.region, other.region);
}

// The first tensor that is written: tables have those behind what is read.
const GivenTensor* written_in(const GivenTensors& tensors) {
  const GivenTensor* first = tensors.begin();
  while (first < tensors.end() && !first->operand->has(kWritten)) ++first;
  return first;
}

// check(written, other) for each pair of a call.
template <typename Check>
void for_each_pair(const GivenTensors& tensors, const Check& check) {
  const GivenTensor* const written = written_in(tensors);
  for (const GivenTensor* a = written; a < tensors.end(); ++a) {
    for (const GivenTensor* b = a + 1; b < tensors.end(); ++b) check(*a, *b);
  }
  for (const GivenTensor* b = tensors.begin(); b < written; ++b) {
    for (const GivenTensor* a = written; a < tensors.end(); ++a) check(*a, *b);
  }
}

template <typename Params>
GivenTensors tensors_of(const Params& params) {
  return GivenTensors(operands_of(params), &params, sizes_of(params));
}

}  // namespace

void check_own_memory(const GivenTensors& tensors) {
  for_each_pair(tensors, check_apart);
}

void check_own_memory(const AppendParams& params, const GivenTensors& tensors) {
  for_each_pair(tensors, [&params](const GivenTensor& a, const GivenTensor& b) {
    if (!disjoint(a.region, b.region) && !may_share(params, a, b)) check_apart(a, b);
  });
}

void check_own_memory(const AppendParams& append, const AttentionParams& attention) {
  const GivenTensors first = tensors_of(append), second = tensors_of(attention);
  const GivenTensor *const by_first = written_in(first), *const by_second = written_in(second);
  for (const GivenTensor* output = by_second; output < second.end(); ++output) {
    for (const GivenTensor& other : first) check_apart(*output, other);
  }
  for (const GivenTensor* input = second.begin(); input < by_second; ++input) {
    const std::string_view name = input->operand->name;
    const bool is_appended = name == "k" || name == "v" || (name == "q" && append.q.data);
    if (is_appended) continue;
    for (const GivenTensor* output = by_first; output < first.end(); ++output)
      check_apart(*output, *input);
  }
}

namespace {

template <typename Params>
void check_last_tensor(const Params& params) {
  const GivenTensors tensors = tensors_of(params);
  const GivenTensor& workspace = *(tensors.end() - 1);
  for (const GivenTensor* output = written_in(tensors); output < &workspace; ++output)
    check_apart(workspace, *output);
  for (const GivenTensor* input = tensors.begin(); input < written_in(tensors); ++input)
    check_apart(workspace, *input);
}

}  // namespace

void check_workspace_memory(const AttentionParams& params) {
  check_last_tensor(params);
}

void check_workspace_memory(const BackwardParams& params) {
  check_last_tensor(params);
}

}  // namespace dlattn::core
