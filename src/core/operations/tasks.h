#pragma once

#include "dlattn/backward.h"
#include "dlattn/forward.h"

// Operations that follow others within a plan, as types of their own.
namespace dlattn {

// The attention whose partial results are to be combined. No family plans it alone: a family of
// kForward that leaves partial results lists the launch that combines them.
struct CombineTask : AttentionParams {};

// The backward pass whose rows of lse and delta are to be prepared, and that whose partial sums are
// to be added up. No family plans them alone: a family of kBackward lists both launches
// (cuda/plan/backward_launches.h).
struct DeltaTask : BackwardParams {};
struct ReduceTask : BackwardParams {};

}  // namespace dlattn
