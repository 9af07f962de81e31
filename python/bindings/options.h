#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "dlattn/attention.h"

// The options of a call, from the Python objects that stand for them.
namespace dlattn::python {

namespace nb = nanobind;

enum class Layout { kBshd, kBhsd };

// More tokens than any sequence has, and few enough that positions can be added to them.
constexpr std::int64_t kMaxWindow = std::int64_t{1} << 40;
constexpr char kOf8Bits[] = "\"int8_fp8\", \"int8_fp16\" or \"fp8\"";
constexpr char kPrecisions[] =
    "\"int8_fp8\", \"int8_fp16\" or \"fp8\", or None for products of the inputs";

Layout parse_layout(nb::handle value);
Causal parse_causal(nb::handle value);
// "wmma", or "wmma:narrow": one of `names`, which are those of an operation, and one of its
// variants, whose name is borrowed from `value`.
void parse_kernel(nb::handle value, const std::vector<std::string_view>& names, Options* options);
// One of the dtypes that out may have; with kFloat8E4M3 for None.
DType parse_out_dtype(nb::handle value, const char* name);
// "int8_fp8", "int8_fp16", "fp8"; kInputs for None.
Precision parse_precision(nb::handle value, const char* name, const char* accepted = kPrecisions);
// The same but None, which is refused.
Precision parse_precision_of_8_bits(nb::handle value, const char* name);
bool parse_flag(nb::handle value, const char* name);
double parse_number(nb::handle value, const char* name);
std::int64_t parse_count(nb::handle value, const char* name);                  // an int >= 0
void parse_window(nb::handle value, std::int64_t* left, std::int64_t* right);  // -1: unlimited

// A CUDA stream: an int, or an object with cuda_stream (torch), ptr (CuPy) or __cuda_stream__ (CUDA
// Python).
void* parse_stream(nb::handle value);

}  // namespace dlattn::python
