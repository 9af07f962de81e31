#include "errors.h"

#include <exception>

namespace dlattn::python {
namespace {

// Long enough for any value that is worth reading.
constexpr std::size_t kMaxRepr = 120;

struct ErrorClasses {
  PyObject* unsupported;
  PyObject* device;
};
ErrorClasses classes;  // references kept for the life of the process, as the translator is

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const UnsupportedError& e) {
    PyErr_SetString(classes.unsupported, e.what());
  } catch (const DeviceError& e) {
    PyErr_SetString(classes.device, e.what());
  }
}

}  // namespace

std::string text(nb::handle object) {
  const nb::object string = nb::steal<nb::object>(PyObject_Str(object.ptr()));
  const char* bytes = string.is_valid() ? PyUnicode_AsUTF8AndSize(string.ptr(), nullptr) : nullptr;
  if (bytes) return bytes;
  PyErr_Clear();  // a broken __str__ must not hide the error that is being reported
  return "?";
}

std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  const std::string module = text(nb::object(nb::getattr(type, "__module__", nb::str("builtins"))));
  const std::string name = text(nb::object(nb::getattr(type, "__qualname__", nb::str("?"))));
  return module == "builtins" ? name : module + "." + name;
}

std::string repr_text(nb::handle object) {
  const nb::object string = nb::steal<nb::object>(PyObject_Repr(object.ptr()));
  if (!string.is_valid()) {
    PyErr_Clear();
    return "<" + type_text(object) + ">";
  }
  std::string shown = text(string);
  if (shown.size() > kMaxRepr) {
    std::size_t end = kMaxRepr;
    while (end > 0 && (shown[end] & 0xC0) == 0x80) --end;  // not within a UTF-8 sequence
    shown = shown.substr(0, end) + "...";
  }
  return shown;
}

void wrong_type_from(nb::python_error& cause, const std::string& message) {
  nb::raise_from(cause, PyExc_TypeError, "%s", message.c_str());
}

bool is_own(const nb::python_error& error) {
  return error.matches(classes.unsupported) || error.matches(classes.device);
}

void register_errors() {
  const nb::module_ errors = nb::module_::import_("dlattn._errors");
  classes.unsupported = nb::object(errors.attr("UnsupportedError")).release().ptr();
  classes.device = nb::object(errors.attr("DeviceError")).release().ptr();
  nb::register_exception_translator(translate);
}

}  // namespace dlattn::python
