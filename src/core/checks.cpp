#include "core/checks.h"

#include <string>

namespace dlattn::core {

void check_many_elements(const char* name, const char* sizes,
                         std::initializer_list<std::int64_t> values) {
  std::int64_t product = 1;
  bool fits = true;
  for (const std::int64_t size : values)
    fits = fits && !__builtin_mul_overflow(product, size > 1 ? size : 1, &product);
  if (fits && product <= kMaxElements) return;
  std::string text;
  for (const std::int64_t size : values) text += concat(text.empty() ? "" : " x ", size);
  fail(name, *name ? ": " : "", sizes, " is ", text, "; accepted: a product of up to ",
       kMaxElements);
}

void check_large_span(const char* name, std::int64_t element_bytes, std::int64_t columns,
                      std::initializer_list<Dim> dims) {
  for (const Dim& dim : dims) {
    if (dim.size == 0) return;
  }
  std::int64_t elements = columns;
  for (const Dim& dim : dims) {
    if (dim.size <= 1 || dim.stride <= 0) continue;
    std::int64_t step, bytes;
    const bool fits = !__builtin_mul_overflow(dim.size - 1, dim.stride, &step) &&
                      !__builtin_add_overflow(elements, step, &elements) &&
                      !__builtin_mul_overflow(elements, element_bytes, &bytes) &&
                      bytes <= kMaxTensorBytes;
    if (fits) continue;
    fail(name, ": the stride of dimension ", dim.name, ", of size ", dim.size, ", is ", dim.stride,
         "; accepted: strides by which the tensor spans up to ", kMaxTensorBytes, " bytes");
  }
}

}  // namespace dlattn::core
