#pragma once

#include "dlattn/forward.h"

namespace dlattn::core {

// A call of forward() of which everything is checked: run() refuses nothing more.
struct PreparedForward {
  AttentionParams params;  // with the workspace that the plan needs
  Plan plan;
  Poll poll;

  void run(void* stream);
};

// Checks a call, makes its plan and takes its workspace. Throws UnsupportedError.
PreparedForward prepare_forward(const AttentionParams& params, const Options& options);

}  // namespace dlattn::core
