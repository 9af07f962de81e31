#pragma once

// dlattn: attention with a streaming softmax. Fill an AttentionParams, call forward. All functions
// are thread-safe. This header brings the whole library.
//
// Sources: Milakov, Gimelshein. Online normalizer calculation for softmax. arXiv:1805.02867, 2018;
// Dao. FlashAttention-2. arXiv:2307.08691, 2023. Those of the features stand in the documentation
// of the Python function dlattn.attention.

#include "dlattn/append.h"
#include "dlattn/backward.h"
#include "dlattn/device.h"
#include "dlattn/error.h"
#include "dlattn/forward.h"
#include "dlattn/merge.h"
#include "dlattn/plan.h"
#include "dlattn/quantize.h"
#include "dlattn/support.h"
#include "dlattn/tensor.h"
#include "dlattn/types.h"
