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

void translate(const std::exception_ptr& error, void* payload) {
  const auto* classes = static_cast<const ErrorClasses*>(payload);
  try {
    std::rethrow_exception(error);
  } catch (const UnsupportedError& e) {
    PyErr_SetString(classes->unsupported, e.what());
  } catch (const DeviceError& e) {
    PyErr_SetString(classes->device, e.what());
  }
}

}  // namespace

std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  const nb::object module = nb::getattr(type, "__module__", nb::none());
  const std::string name = nb::str(nb::getattr(type, "__qualname__", nb::str("?"))).c_str();
  const std::string scope = nb::str(module).c_str();
  return scope == "builtins" || module.is_none() ? name : scope + "." + name;
}

std::string repr_text(nb::handle object) {
  const nb::object text = nb::steal<nb::object>(PyObject_Repr(object.ptr()));
  if (!text.is_valid()) {  // a broken __repr__ must not hide the error that is being reported
    PyErr_Clear();
    return "<" + type_text(object) + ">";
  }
  std::string shown = nb::str(text).c_str();
  if (shown.size() > kMaxRepr) shown = shown.substr(0, kMaxRepr) + "...";
  return shown;
}

void wrong_type_from(nb::python_error& cause, const std::string& message) {
  nb::raise_from(cause, PyExc_TypeError, "%s", message.c_str());
}

void register_errors() {
  const nb::module_ errors = nb::module_::import_("dlattn._errors");
  static ErrorClasses classes;  // references kept for the life of the process, as the translator is
  classes.unsupported = nb::object(errors.attr("UnsupportedError")).release().ptr();
  classes.device = nb::object(errors.attr("DeviceError")).release().ptr();
  nb::register_exception_translator(translate, &classes);
}

}  // namespace dlattn::python
