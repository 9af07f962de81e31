#pragma once

#include "async_copy.h"
#include "block.h"

namespace simt {

// Runs body() as every thread of the launch.
template <typename Body>
void launch(const Launch& shape, Body body) {
  const auto thread = [](void* context) {
    (*static_cast<Body*>(context))();
    finish_async_copies();
  };
  run(shape, thread, &body);
}

}  // namespace simt
