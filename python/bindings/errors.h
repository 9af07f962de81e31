#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "core/util/concat.h"
#include "dlattn/types.h"

namespace dlattn::python {

namespace nb = nanobind;

using core::concat;

// Raises dlattn.UnsupportedError: the argument is of the right type, its value is not accepted.
template <typename... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  throw UnsupportedError(concat(parts...));
}

// Raises TypeError: the argument is not the kind of object that is accepted.
template <typename... Parts>
[[noreturn]] void wrong_type(const Parts&... parts) {
  throw nb::type_error(concat(parts...).c_str());
}

std::string text(nb::handle object);       // as str() gives it
std::string type_text(nb::handle object);  // "list", "numpy.ndarray"
std::string repr_text(nb::handle object);  // as Python prints it, shortened

std::string shortened(const std::string& shown);  // as repr_text does it

// Raises `message` as a TypeError caused by the Python exception that is being handled.
[[noreturn]] void wrong_type_from(nb::python_error& cause, const std::string& message);

// Whether Python code raised dlattn.UnsupportedError or DeviceError.
bool is_own(const nb::python_error& error);

// Makes dlattn::UnsupportedError and dlattn::DeviceError the Python classes of dlattn._errors.
void register_errors();

}  // namespace dlattn::python
