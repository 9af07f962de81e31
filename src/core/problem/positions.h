#pragma once

#include <cstdint>
#include <limits>

#include "core/util/inline.h"
#include "dlattn/forward.h"

// Where queries stand among the keys, and which keys they may see for that reason: ragged ends,
// causality in both alignments, windows. The one definition of it, for plans, the CPU backend,
// kernels and the reference of their tests; bias and mask are no matter of positions.
//
// `Int` counts positions: int in kernels, std::int64_t on the host.
namespace dlattn {

// Items begin .. end - 1; none if end <= begin.
template <typename Int>
struct Range {
  Int begin;
  Int end;
};

template <typename Int>
DLATTN_SHARED bool contains(const Range<Int>& range, Int i) {
  return i >= range.begin && i < range.end;
}

// Whether all of first .. first + count - 1 are in the range.
template <typename Int>
DLATTN_SHARED bool contains_all(const Range<Int>& range, Int first, Int count) {
  return first >= range.begin && first + count <= range.end;
}

// Query i stands at key position i + shift: the last query at the last key, or the first one at the
// first.
template <typename Int>
DLATTN_SHARED Int position_shift(Causal causal, Int seqlen_q, Int seqlen_k) {
  return causal == Causal::kTopLeft ? 0 : seqlen_k - seqlen_q;
}

// A side of a window that is wider than any sequence. A position can be added to it.
template <typename Int>
constexpr Int kUnlimited = std::numeric_limits<Int>::max() / 2;

// A query at position x may see keys x - left .. x + right. Causality is right = 0.
template <typename Int>
struct Window {
  Int left;
  Int right;

  DLATTN_SHARED bool is_bounded() const {
    return left < kUnlimited<Int> && right < kUnlimited<Int>;
  }
};

template <typename Int>
DLATTN_SHARED Int window_side(std::int64_t keys) {
  return keys < 0 || keys > kUnlimited<Int> ? kUnlimited<Int> : static_cast<Int>(keys);
}
// The window of AttentionParams' fields of these names.
template <typename Int>
DLATTN_SHARED Window<Int> window_of(Causal causal, std::int64_t window_left,
                                    std::int64_t window_right) {
  return {window_side<Int>(window_left),
          causal == Causal::kNone ? window_side<Int>(window_right) : 0};
}
template <typename Int>
DLATTN_SHARED Window<Int> window_of(const AttentionParams& p) {
  return window_of<Int>(p.causal, p.window_left, p.window_right);
}

// Which keys the queries of one sequence may see. Both ends of a query's range never decrease from
// one query to the next.
template <typename Int>
struct PositionMask {
  Int shift;
  Int seqlen_k;
  Window<Int> window;

  DLATTN_SHARED PositionMask(const Window<Int>& window, Int shift, Int seqlen_k)
      : shift(shift), seqlen_k(seqlen_k), window(window) {}

  DLATTN_SHARED Int position(Int query) const { return query + shift; }

  // The keys that a query sees, counted from key `origin`.
  DLATTN_SHARED Range<Int> row(Int query, Int origin = 0) const {
    const Int at = position(query) - origin;
    return {greater(-origin, at - window.left), lesser(seqlen_k - origin, at + window.right + 1)};
  }

  // The queries that see a key.
  DLATTN_SHARED Range<Int> column(Int key) const {
    const Int query = key - shift;
    return {query - window.right, key < seqlen_k ? query + window.left + 1 : query - window.right};
  }

  // The keys that at least one of queries first .. last sees.
  DLATTN_SHARED Range<Int> any_row(Int first, Int last) const {
    return {row(first).begin, row(last).end};
  }

  // The keys that each of queries first .. last sees.
  DLATTN_SHARED Range<Int> every_row(Int first, Int last) const {
    return {row(last).begin, row(first).end};
  }
};

// The tiles of `block_n` keys that have one of `keys`, numbered by their first key / block_n.
template <typename Int>
DLATTN_SHARED Range<Int> tiles_of(const Range<Int>& keys, Int block_n) {
  const bool none = keys.end <= keys.begin;
  return {none ? 0 : keys.begin / block_n, none ? 0 : (keys.end + block_n - 1) / block_n};
}

// Those that are within `keys`. The compiler sees that the dividend is not negative and shifts it.
template <typename Int>
DLATTN_SHARED Range<Int> whole_tiles_of(const Range<Int>& keys, Int block_n) {
  return {(greater<Int>(keys.begin, 0) + block_n - 1) / block_n,
          greater<Int>(keys.end, 0) / block_n};
}

}  // namespace dlattn
