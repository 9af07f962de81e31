#include "core/validate/checks.h"

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

}  // namespace dlattn::core
