#pragma once

#include "cpu/arena.h"
#include "cpu/outer_product.h"
#include "dlattn/backward.h"

namespace dlattn::cpu::DLATTN_CPU_ISA {

// Columns of a head as lanes of a product.
template <typename T>
DLATTN_INLINE std::int64_t padded_columns(std::int64_t columns) {
  if (columns <= kWidth<T>) return kWidth<T>;
  if (columns <= 2 * kWidth<T>) return 2 * kWidth<T>;
  constexpr std::int64_t kStep = kMaxCols * kWidth<T>;
  return (columns + kStep - 1) / kStep * kStep;
}

// The sums of dk and dv, with a row of padded columns for each key.
template <typename T>
struct KeySums {
  KeySums() = default;
  KeySums(const AttentionParams& p, std::int64_t keys, Arena* arena)
      : k_columns(padded_columns<T>(p.head_dim)), v_columns(padded_columns<T>(p.head_dim_v)) {
    dk = arena->take<T>(keys * k_columns);
    dv = arena->take<T>(keys * v_columns);
  }

  KeySums from_key(std::int64_t key) const {
    KeySums rows = *this;
    rows.dk += key * k_columns, rows.dv += key * v_columns;
    return rows;
  }

  void clear(std::int64_t keys) const {
    for (std::int64_t i = 0; i < keys * k_columns; ++i) dk[i] = T(0);
    for (std::int64_t i = 0; i < keys * v_columns; ++i) dv[i] = T(0);
  }

  void add(const KeySums& other, std::int64_t keys) const {
    for (std::int64_t i = 0; i < keys * k_columns; ++i) dk[i] += other.dk[i];
    for (std::int64_t i = 0; i < keys * v_columns; ++i) dv[i] += other.dv[i];
  }

  T *dk = nullptr, *dv = nullptr;
  std::int64_t k_columns = 0, v_columns = 0;
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
