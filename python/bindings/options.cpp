#include "options.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

constexpr char kLayouts[] = "\"bshd\" or \"bhsd\"";
constexpr char kCausals[] = "False, True, \"bottom_right\" or \"top_left\"";

// Pointer equality first: the values a program passes are mostly interned.
bool is_text(nb::handle value, const char* text) {
  return PyUnicode_Check(value.ptr()) && PyUnicode_CompareWithASCIIString(value.ptr(), text) == 0;
}

// Whether `value` is a real number of Python's tower, which no tensor is: reading one of those
// could wait for a device.
bool is_real(nb::handle value) {
  if (PyBool_Check(value.ptr())) return false;
  const nb::object kind = nb::module_::import_("numbers").attr("Real");
  const int yes = guarded([&] { return PyObject_IsInstance(value.ptr(), kind.ptr()); });
  if (yes < 0) throw nb::python_error();
  return yes;
}

// As dlattn._numbers.integer: an int, or an integer of another library, but no bool and no tensor.
bool is_int(nb::handle value) {
  if (PyBool_Check(value.ptr())) return false;
  return PyLong_Check(value.ptr()) ||
         (PyIndex_Check(value.ptr()) && !nb::hasattr(value, "__dlpack__"));
}

// Saturates.
std::int64_t to_int64(nb::handle value) {
  const nb::object index =
      nb::steal<nb::object>(guarded([&] { return PyNumber_Index(value.ptr()); }));
  if (!index.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (number == -1 && !overflow && PyErr_Occurred()) throw nb::python_error();
  return overflow > 0 ? INT64_MAX : overflow < 0 ? INT64_MIN : number;
}

std::int64_t window_side(nb::handle value, const char* side, nb::handle window) {
  if (value.is_none()) return -1;
  if (!is_int(value)) {
    wrong_type("window is ", repr_text(window), ": its ", side, " side is of type ",
               type_text(value), "; accepted: an int >= 0, or None for no limit");
  }
  const std::int64_t tokens = to_int64(value);
  if (tokens < 0) {
    unsupported("window is ", repr_text(window), ": its ", side,
                " side is negative; accepted: an int >= 0, or None for no limit");
  }
  return std::min(tokens, kMaxWindow);
}

}  // namespace

Layout parse_layout(nb::handle value) {
  if (is_text(value, "bshd")) return Layout::kBshd;
  if (is_text(value, "bhsd")) return Layout::kBhsd;
  if (!PyUnicode_Check(value.ptr()))
    wrong_type("layout is of type ", type_text(value), "; accepted: ", kLayouts);
  unsupported("layout is ", repr_text(value), "; accepted: ", kLayouts);
}

Causal parse_causal(nb::handle value) {
  if (value.ptr() == Py_False) return Causal::kNone;
  if (value.ptr() == Py_True || is_text(value, "bottom_right")) return Causal::kBottomRight;
  if (is_text(value, "top_left")) return Causal::kTopLeft;
  if (!PyUnicode_Check(value.ptr()))
    wrong_type("causal is of type ", type_text(value), "; accepted: ", kCausals);
  unsupported("causal is ", repr_text(value), "; accepted: ", kCausals);
}

void parse_kernel(nb::handle value, const std::vector<std::string_view>& names, Options* options) {
  for (const std::string_view name : names) {
    if (is_text(value, name.data())) {  // a literal
      options->kernel = name;
      return;
    }
  }
  std::string accepted;
  for (const std::string_view name : names)
    accepted += concat(accepted.empty() ? "\"" : ", \"", name, "\"");
  if (!PyUnicode_Check(value.ptr()))
    wrong_type("kernel is of type ", type_text(value), "; accepted: ", accepted);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);  // lives as long as `value`
  if (!text) PyErr_Clear();  // lone surrogates, which no kernel's name has
  const bool whole = text && std::strlen(text) == static_cast<std::size_t>(size);
  const char* colon = whole ? std::strchr(text, ':') : nullptr;
  for (const std::string_view name : names) {
    if (colon && std::string(text, colon) == name) {
      options->kernel = name;
      options->variant = colon + 1;
      return;
    }
  }
  unsupported("kernel is ", repr_text(value), "; accepted: ", accepted,
              ", or a kernel and its variant, as in \"wmma:narrow\"");
}

DType parse_out_dtype(nb::handle value, const char* name) {
  if (value.is_none()) return DType::kFloat8E4M3;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (is_text(value, to_string(dtype))) return dtype;
  }
  constexpr char kAccepted[] = "\"bfloat16\", \"float16\" or \"float32\", or None for the default";
  if (!PyUnicode_Check(value.ptr()))
    wrong_type(name, " is of type ", type_text(value), "; accepted: ", kAccepted);
  unsupported(name, " is ", repr_text(value), "; accepted: ", kAccepted);
}

Precision parse_precision(nb::handle value, const char* name, const char* accepted) {
  if (value.is_none()) return Precision::kInputs;
  for (const Precision precision : {Precision::kInt8Fp8, Precision::kInt8Fp16, Precision::kFp8}) {
    if (is_text(value, to_string(precision))) return precision;
  }
  if (!PyUnicode_Check(value.ptr()))
    wrong_type(name, " is of type ", type_text(value), "; accepted: ", accepted);
  unsupported(name, " is ", repr_text(value), "; accepted: ", accepted);
}

Precision parse_precision_of_8_bits(nb::handle value, const char* name) {
  const Precision precision = parse_precision(value, name, kOf8Bits);
  if (precision == Precision::kInputs) unsupported(name, " is None; accepted: ", kOf8Bits);
  return precision;
}

bool parse_flag(nb::handle value, const char* name) {
  if (!PyBool_Check(value.ptr()))
    wrong_type(name, " is of type ", type_text(value), "; accepted: a bool");
  return value.ptr() == Py_True;
}

double parse_number(nb::handle value, const char* name) {
  const bool number = PyFloat_Check(value.ptr()) || is_int(value) || is_real(value);
  if (!number) wrong_type(name, " is of type ", type_text(value), "; accepted: a float");
  const double result = guarded([&] { return PyFloat_AsDouble(value.ptr()); });
  if (result == -1.0 && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw nb::python_error();
    PyErr_Clear();  // an int beyond the floats
    unsupported(name, " is ", repr_text(value), "; accepted: a finite number");
  }
  return result;
}

std::int64_t parse_count(nb::handle value, const char* name) {
  if (!is_int(value)) wrong_type(name, " is of type ", type_text(value), "; accepted: an int >= 0");
  const std::int64_t count = to_int64(value);
  if (count < 0 || count > INT32_MAX)
    unsupported(name, " is ", repr_text(value), "; accepted: an int from 0 to ", INT32_MAX);
  return count;
}

void parse_window(nb::handle value, std::int64_t* left, std::int64_t* right) {
  const bool sequence = PyTuple_Check(value.ptr()) || PyList_Check(value.ptr());
  if (!sequence || nb::len(value) != 2) {
    wrong_type("window is ", repr_text(value),
               "; accepted: a pair (left, right) of int >= 0 or None");
  }
  *left = window_side(value[0], "left", value);
  *right = window_side(value[1], "right", value);
}

void* parse_stream(nb::handle value) {
  nb::object handle = nb::borrow(value);
  if (nb::hasattr(value, "cuda_stream")) {
    handle = value.attr("cuda_stream");
  } else if (nb::hasattr(value, "__cuda_stream__")) {
    const nb::object protocol = value.attr("__cuda_stream__");
    const nb::object pair = PyCallable_Check(protocol.ptr()) ? nb::object(protocol()) : protocol;
    if (!(PyTuple_Check(pair.ptr()) || PyList_Check(pair.ptr())) || nb::len(pair) != 2) {
      wrong_type("stream: its __cuda_stream__ is ", repr_text(pair),
                 "; accepted: a pair (version, handle)");
    }
    handle = pair[1];
  } else if (nb::hasattr(value, "ptr")) {
    handle = value.attr("ptr");
  }
  if (!is_int(handle)) {
    wrong_type("stream is of type ", type_text(value),
               "; accepted: an int, or an object with cuda_stream, ptr or __cuda_stream__");
  }
  const std::int64_t number = to_int64(handle);
  if (number < 0 || number == INT64_MAX)  // saturated
    unsupported("stream is ", repr_text(value), "; accepted: the handle of a CUDA stream, >= 0");
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number));
}

}  // namespace dlattn::python
