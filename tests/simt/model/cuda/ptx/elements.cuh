#pragma once

// CUDA's own headers, whose conversions are there for the host too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
