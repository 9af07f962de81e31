#pragma once

#include <cstdint>

#include "core/util/inline.h"
#include "cuda/tile/divider.h"
#include "dlattn/backward.h"

// The workspace of a backward pass, and the launches that all families of it list: plain C++, for
// plans, launchers and kernels.
//
//   delta    before the family's own: lse and delta of every row of q; zeros in the rows of dq, dk
//            and dv that no sequence has, and in Plan::cleared_bytes of workspace
//   reduce   after them: dsinks and dalibi_slopes from partial sums
namespace dlattn {

// Rows of lse and delta are padded to multiples of it, so that tiles of up to as many rows read
// them without a bound and by 16 bytes. Rows in the padding have lse = inf and delta = 0.
constexpr int kDeltaRows = 128;

// The first row, in lse and delta, of a varlen sequence whose first row of q is `start`. Rounded,
// so that it takes no sum over the sequences before.
DLATTN_SHARED std::int64_t first_padded_row(int start, int sequence) {
  return std::int64_t{start / kDeltaRows + sequence} * kDeltaRows;
}
// The rows of a head: of a batch entry, or of all sequences.
DLATTN_SHARED std::int64_t padded_rows(const AttentionParams& p) {
  if (p.cu_seqlens_q) return (p.total_q / kDeltaRows + p.batch_size) * kDeltaRows;
  return (p.seqlen_q + kDeltaRows - 1) / kDeltaRows * kDeltaRows;
}
// The index of a head's first row of a sequence, which with variable length begins at row `start_q`
// of q.
DLATTN_SHARED std::int64_t padded_row_index(const AttentionParams& p, int batch, int head,
                                            int start_q) {
  if (p.cu_seqlens_q) return head * padded_rows(p) + first_padded_row(start_q, batch);
  return (batch * p.num_heads + head) * padded_rows(p);
}
// Blocks of kDeltaRows rows of each head and sequence, at most.
DLATTN_SHARED std::int64_t delta_blocks(const AttentionParams& p) {
  return (p.seqlen_q + kDeltaRows - 1) / kDeltaRows;
}

// Whether lse is kept as it is, else times log2(e). A bias or slopes may be so large that the
// multiple is infinite, or rounded by so much that exp2 of a difference is: the natural one is
// subtracted from natural scores first.
DLATTN_SHARED bool has_natural_lse(const AttentionParams& p) {
  return p.bias.data || p.alibi_slopes.data;
}

// Byte offsets into the workspace. All are multiples of 128.
struct BackwardWorkspace {
  std::int64_t lse;          // float [rows]: by has_natural_lse(), or inf where a row sees nothing
  std::int64_t delta;        // float [rows]: rowsum(dout * out) - dlse
  std::int64_t sink_parts;   // float [batch_size][num_heads][delta_blocks]; none without dsinks
  std::int64_t slope_parts;  // float [batch_size][num_heads][Plan::parts_per_head]
  std::int64_t own;          // of the family; Plan::cleared_bytes at the workspace's end are zero
};

// `parts_per_head`: as Plan has it.
DLATTN_SHARED BackwardWorkspace backward_workspace(const BackwardParams& b,
                                                   std::int64_t parts_per_head) {
  const AttentionParams& p = b.forward;
  const auto floats = [](std::int64_t count) { return (count * 4 + 127) / 128 * 128; };
  const std::int64_t heads = p.batch_size * p.num_heads;
  const std::int64_t rows = (p.cu_seqlens_q ? p.num_heads : heads) * padded_rows(p);
  BackwardWorkspace map{};
  map.delta = map.lse + floats(rows);
  map.sink_parts = map.delta + floats(rows);
  map.slope_parts = map.sink_parts + (b.dsinks.data ? floats(heads * delta_blocks(p)) : 0);
  map.own = map.slope_parts + floats(heads * parts_per_head);
  return map;
}

template <typename T>
DLATTN_SHARED T* workspace_at(const BackwardParams& b, std::int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(b.forward.workspace) + offset);
}

// lse and delta of the rows of a head of a sequence.
struct DeltaRows {
  const float* lse;
  const float* delta;

  DLATTN_SHARED DeltaRows(const BackwardParams& b, int batch, int head, int start_q) {
    const BackwardWorkspace map = backward_workspace(b, 0);
    const std::int64_t first = padded_row_index(b.forward, batch, head, start_q);
    lse = workspace_at<const float>(b, map.lse) + first;
    delta = workspace_at<const float>(b, map.delta) + first;
  }
};

}  // namespace dlattn
