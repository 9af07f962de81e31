#pragma once

#include "core/operations/operand.h"
#include "core/validate/overlap.h"

// The tensors of one call, and what is checked of all of them alike.
namespace dlattn::core {

struct GivenTensor {
  const Operand* operand;
  Region region;
};

// Those that are not null, in the order of the table.
class GivenTensors {
 public:
  GivenTensors(const Operands& table, const void* params, const Sizes& sizes);

  const GivenTensor* begin() const { return tensors_; }
  const GivenTensor* end() const { return tensors_ + count_; }

  // The first required tensor with elements that is null, and which part of an array; null: none.
  const Operand* missing() const { return missing_; }
  std::int64_t missing_part() const { return missing_part_; }

 private:
  static constexpr int kMost = 68;  // of a merge
  GivenTensor tensors_[kMost];      // the first count_ are set
  int count_ = 0;
  const Operand* missing_ = nullptr;
  std::int64_t missing_part_ = 0;
};

// Each throws UnsupportedError.

// For sizes that are negative, less than the table says or too large.
void check_sizes(const Operands& table, const void* params);

// If a required tensor with elements is null.
void check_given(const GivenTensors& tensors);

// For a tensor of rows with too many elements.
void check_elements(const GivenTensors& tensors);

// Where a tensor cannot be what its dimensions say: for an address that no element has, negative
// strides, a span that is too large, and where two elements to be written have one address.
void check_layouts(const GivenTensors& tensors);

}  // namespace dlattn::core
