#include "core/operations/tensors.h"

#include "core/validate/checks.h"
#include "core/validate/fail.h"

namespace dlattn::core {
namespace {

std::int64_t element_bytes(const Operand& operand, DType dtype, const Sizes& sizes) {
  switch (operand.elements) {
    case Elements::kAny:
    case Elements::kCached:
      return size_of(dtype);
    case Elements::kFloat32:
    case Elements::kInt32:
      return 4;
    case Elements::kSlots:
      return sizes['x'];
    default:
      return 1;
  }
}

// Sizes and strides, one by one: a call has just written its parameters, which wider accesses would
// wait for.
void set_region(const Operand& operand, const char* view, const Sizes& sizes, Region* region) {
  const bool has_strides = operand.num_strides > 0;
  region->data = load<const void*>(view, 0);
  region->element_bytes = element_bytes(
      operand, has_strides ? load<DType>(view, offsetof(TensorView, dtype)) : DType(), sizes);
  region->run = operand.run ? sizes[operand.run] : 1;
  for (int i = 0; i < 4; ++i) region->sizes[i] = 1, region->strides[i] = 0;
  for (int i = 0; i < operand.num_strides; ++i) {
    region->sizes[i] = sizes[operand.dims[i]];
    region->strides[i] = load<std::int64_t>(view, stride_offset(operand.strides[i]));
    if (operand.has(kSummed) && region->strides[i] == 0 && region->sizes[i] > 1)
      region->sizes[i] = 1;
  }
}

std::int64_t parts_of(const Operand& operand, const Sizes& sizes) {
  return operand.kind == Kind::kTensors ? sizes['N'] : 1;
}

// Whether the tensor is one of rows of a head, as q is.
bool has_rows(const Operand& operand) {
  return operand.run == 'd' || operand.run == 'e' || operand.run == 'c';
}

bool is_empty(const Operand& operand, const Sizes& sizes) {
  bool empty = operand.run && sizes[operand.run] == 0;
  for (int i = 0; i < operand.num_strides; ++i) empty |= sizes[operand.dims[i]] == 0;
  return empty;
}
bool is_empty(const Region& region) {
  bool empty = region.run == 0;
  for (const std::int64_t size : region.sizes) empty |= size == 0;
  return empty;
}

// Whether sizes and strides are so small, and strides not negative, that no check of them fails.
bool is_small(const Region& region) {
  std::int64_t sizes = region.run, strides = 0;
  for (int i = 0; i < 4; ++i) sizes |= region.sizes[i], strides |= region.strides[i];
  return sizes >> 24 == 0 && strides >> 30 == 0;
}

// The stride of a dimension of one element is never used, so it may be anything.
void check_not_negative(const Operand& operand, const Region& region) {
  for (int i = 0; i < 4; ++i) {
    if (region.sizes[i] <= 1 || region.strides[i] >= 0) continue;
    fail(operand.name, ": the stride of dimension ", name_of_dim(operand.dims[i]), " is ",
         region.strides[i], "; negative strides are not accepted");
  }
}

// Where the last element lies, behind the first one. Negative strides are refused elsewhere.
void check_span(const Operand& operand, const Region& region) {
  if (is_empty(region)) return;
  std::int64_t elements = region.run;
  for (int i = 0; i < 4; ++i) {
    const std::int64_t size = region.sizes[i], stride = region.strides[i];
    if (size <= 1 || stride <= 0) continue;
    std::int64_t step, bytes;
    const bool fits = !__builtin_mul_overflow(size - 1, stride, &step) &&
                      !__builtin_add_overflow(elements, step, &elements) &&
                      !__builtin_mul_overflow(elements, region.element_bytes, &bytes) &&
                      bytes <= kMaxTensorBytes;
    if (fits) continue;
    fail(operand.name, ": the stride of dimension ", name_of_dim(operand.dims[i]), ", of size ",
         size, ", is ", stride, "; accepted: strides by which the tensor spans up to ",
         kMaxTensorBytes, " bytes");
  }
}

// An output must not map two elements to one address. Its span is checked. Strides of an injective
// layout, sorted, each reach past all that the smaller ones span.
void check_injective(const Operand& operand, const Region& region) {
  std::int64_t extent = region.run;
  bool used[4];
  for (int i = 0; i < 4; ++i) used[i] = region.sizes[i] <= 1;
  for (;;) {
    int next = -1;
    for (int i = 0; i < 4; ++i) {
      if (!used[i] && (next < 0 || region.strides[i] < region.strides[next])) next = i;
    }
    if (next < 0) return;
    if (region.strides[next] < extent) {
      fail(operand.name, ": a stride of ", region.strides[next],
           " elements makes elements share memory; accepted: at least ", extent, " there");
    }
    extent += region.strides[next] * (region.sizes[next] - 1);
    used[next] = true;
  }
}

}  // namespace

GivenTensors::GivenTensors(const Operands& table, const void* params, const Sizes& sizes) {
  for (const Operand* operand = table.tensors; operand < table.end; ++operand) {
    for (std::int64_t n = 0; n < parts_of(*operand, sizes); ++n) {
      const char* const view = field_of(*operand, params, n);
      if (!load<const void*>(view, 0)) {
        if (!missing_ && operand->has(kRequired) && !is_empty(*operand, sizes))
          missing_ = operand, missing_part_ = n;
        continue;
      }
      GivenTensor& tensor = tensors_[count_++];
      tensor.operand = operand;
      set_region(*operand, view, sizes, &tensor.region);
    }
  }
}

void check_sizes(const Operands& table, const void* params) {
  for (const Operand* size = table.sizes; size < table.tensors; ++size) {
    if (size->kind == Kind::kNumber) continue;
    check_within(size->name, load<std::int64_t>(params, size->offset), size->least,
                 size->kind == Kind::kCount ? kMaxCount : kMaxLength);
  }
}

void check_given(const GivenTensors& tensors) {
  const Operand* const missing = tensors.missing();
  if (!missing) return;
  const bool is_part = missing->kind == Kind::kTensors;
  fail(missing->name, is_part ? concat("[", tensors.missing_part(), "]") : "", " is null");
}

void check_elements(const GivenTensors& tensors) {
  for (const auto& [operand, region] : tensors) {
    if (!has_rows(*operand) || is_small(region)) continue;
    std::int64_t of[3] = {1, 1, 1};
    for (int i = 0; i < operand->num_strides; ++i) of[operand->strides[i]] = region.sizes[i];
    check_elements(operand->name, {of[0], of[1], of[2]}, region.run);
  }
}

void check_layouts(const GivenTensors& tensors) {
  for (const auto& [operand, region] : tensors) {
    check_address(operand->name, region.data, region.element_bytes);
    if (!is_small(region)) {
      check_not_negative(*operand, region);
      check_span(*operand, region);
    }
    if (operand->has(kWritten) && !is_empty(region)) check_injective(*operand, region);
  }
}

}  // namespace dlattn::core
