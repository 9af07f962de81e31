#pragma once

// Headers that are precompiled, after prelude.h, for each variant of the tests: to read them takes
// a third of the time that most tests take to compile. Not attention_test.h, before which a test
// may define SIMT_SANITIZED_TILE.
#include <cuda_fp8.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <string_view>

#include "../cpp/devices.h"
#include "compare.h"
#include "core/plan/plan.h"
#include "core/validate/validate.h"
#include "cuda/plan/launch_shape.h"
#include "harness/launch.h"
#include "random_cases.h"
