#pragma once

#include "async_copy.h"
#include "block.h"
#include "bulk_copy.h"
#include "wgmma.h"

namespace simt {

// Runs body() as every thread of the launch.
template <typename Body>
void launch(const Launch& shape, Body body) {
  const auto thread = [](void* context) {
    (*static_cast<Body*>(context))();
    finish_async_copies();
    finish_bulk_stores();
    finish_wgmma();
  };
  run(shape, thread, &body);
}

}  // namespace simt
