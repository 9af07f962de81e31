#pragma once

#include "core/util/concat.h"
#include "dlattn/types.h"

namespace dlattn::core {

// Refuses a call, with a message of its parts.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw UnsupportedError(concat(parts...));
}

}  // namespace dlattn::core
