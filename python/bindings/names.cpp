#include "names.h"

#include "gil.h"

namespace dlattn::python {

Names names;

void register_names() {
  const auto kept = [](const char* name) { return interned(name).release(); };
  names.array_struct = kept("__array_struct__");
  names.empty = kept("empty");
  names.is_conj = kept("is_conj");
  names.requires_grad = kept("requires_grad");
}

}  // namespace dlattn::python
