// Positions and what they let queries see (core/problem/positions.h), against forward.h's words,
// key by key.
#include "core/problem/positions.h"

#include "check.h"

using namespace dlattn;

namespace {

bool sees(Causal causal, int left, int right, int seqlen_q, int seqlen_k, int i, int j) {
  const int position = causal == Causal::kTopLeft ? i : i + seqlen_k - seqlen_q;
  if (j < 0 || j >= seqlen_k) return false;
  if (causal != Causal::kNone && j > position) return false;
  if (left >= 0 && j < position - left) return false;
  return causal != Causal::kNone || right < 0 || j <= position + right;
}

template <typename Int>
void check_case(Causal causal, int left, int right, int seqlen_q, int seqlen_k) {
  const Int shift = position_shift<Int>(causal, seqlen_q, seqlen_k);
  const PositionMask<Int> mask(window_of<Int>(causal, left, right), shift, seqlen_k);
  const auto expected = [&](int i, int j) {
    return sees(causal, left, right, seqlen_q, seqlen_k, i, j);
  };
  constexpr int kBlockN = 3;
  for (int first = 0; first < seqlen_q; ++first) {
    const int last = first + 2 < seqlen_q ? first + 2 : seqlen_q - 1;
    const Range<Int> tiles = tiles_of<Int>(mask.any_row(first, last), kBlockN);
    const Range<Int> whole = whole_tiles_of<Int>(mask.every_row(first, last), kBlockN);
    for (int j = 0; j < seqlen_k; ++j) {
      CHECK_EQ(contains<Int>(mask.row(first), j), expected(first, j));
      CHECK_EQ(contains<Int>(mask.row(first, 2), j - 2), expected(first, j));
      CHECK_EQ(contains<Int>(mask.column(j), first), expected(first, j));
      // Keys that none of the rows sees lie in no tile of theirs but with others that one sees.
      for (int i = first; i <= last; ++i) {
        if (expected(i, j)) CHECK(contains<Int>(tiles, j / kBlockN));
        if (contains<Int>(whole, j / kBlockN)) CHECK(expected(i, j));
      }
    }
    for (Int n = tiles.begin; n < tiles.end; ++n) {
      bool seen = false;
      for (int i = first; i <= last; ++i) {
        for (int j = 0; j < kBlockN; ++j) seen |= expected(i, static_cast<int>(n) * kBlockN + j);
      }
      // A window leaves no gap between two rows' keys unless it is of no key at all.
      CHECK(seen);
    }
  }
}

}  // namespace

int main() {
  for (const Causal causal : {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft}) {
    for (const int left : {-1, 0, 1, 4, 100}) {
      for (const int right : {-1, 0, 2, 100}) {
        for (const int seqlen_q : {1, 2, 7}) {
          for (const int seqlen_k : {0, 1, 5, 8, 11}) {
            check_case<int>(causal, left, right, seqlen_q, seqlen_k);
            check_case<std::int64_t>(causal, left, right, seqlen_q, seqlen_k);
          }
        }
      }
    }
  }
  // Sides that 32 bits do not hold are no sides there; validation accepts them.
  const std::int64_t wide = std::int64_t{1} << 40;
  CHECK(!window_of<int>(Causal::kNone, wide, wide).is_bounded());
  CHECK(window_of<std::int64_t>(Causal::kNone, wide, wide).is_bounded());
  CHECK(!window_of<std::int64_t>(Causal::kNone, wide, -1).is_bounded());
  CHECK(window_of<std::int64_t>(Causal::kTopLeft, 3, -1).is_bounded());
  return test::summary();
}
