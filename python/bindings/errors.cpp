#include "errors.h"

#include <cstring>
#include <exception>

#include "gil.h"

namespace dlattn::python {
namespace {

// Long enough for any value that is worth reading.
constexpr std::size_t kMaxRepr = 120;

struct ErrorClasses {
  PyObject* unsupported;
  PyObject* device;
};
ErrorClasses classes;  // references kept for the life of the process, as the translator is

// A message may quote bytes that are no UTF-8, as environment variables may hold.
void raise(PyObject* kind, const char* message) {
  const nb::object text = nb::steal<nb::object>(PyUnicode_DecodeUTF8(
      message, static_cast<Py_ssize_t>(std::strlen(message)), "backslashreplace"));
  if (text.is_valid()) PyErr_SetObject(kind, text.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const UnsupportedError& e) {
    raise(classes.unsupported, e.what());
  } catch (const DeviceError& e) {
    raise(classes.device, e.what());
  }
}

// A type's attribute, if it is text: classes may lack these, or define them as something else.
std::string type_attribute(nb::handle type, const char* name, const char* otherwise) {
  const nb::object value =
      nb::steal<nb::object>(guarded([&] { return PyObject_GetAttrString(type.ptr(), name); }));
  if (!value.is_valid()) PyErr_Clear();
  return value.is_valid() && PyUnicode_Check(value.ptr()) ? text(value) : otherwise;
}

bool is_array(nb::handle object) {
  return nb::hasattr(object, "__dlpack__") || nb::hasattr(object, "__cuda_array_interface__");
}

// Whether there are arrays in what is to be shown: of a GPU's memory the host would wait for it.
bool has_arrays(nb::handle object) {
  if (!PyTuple_Check(object.ptr()) && !PyList_Check(object.ptr())) return is_array(object);
  const Py_ssize_t size = PySequence_Size(object.ptr());
  for (Py_ssize_t i = 0; i < size; ++i) {
    const nb::object item = nb::steal<nb::object>(PySequence_GetItem(object.ptr(), i));
    if (item.is_valid() && is_array(item)) return true;
    PyErr_Clear();  // of a list that has become shorter
  }
  return false;
}

}  // namespace

std::string text(nb::handle object) {
  const nb::object string =
      nb::steal<nb::object>(guarded([&] { return PyObject_Str(object.ptr()); }));
  // UTF-8 has no lone surrogates, which a string may hold.
  const nb::object bytes = string.is_valid() ? nb::steal<nb::object>(PyUnicode_AsEncodedString(
                                                   string.ptr(), "utf-8", "backslashreplace"))
                                             : nb::object();
  char* content = nullptr;
  Py_ssize_t size = 0;
  if (bytes.is_valid() && PyBytes_AsStringAndSize(bytes.ptr(), &content, &size) == 0)
    return {content, static_cast<std::size_t>(size)};
  PyErr_Clear();  // a broken __str__ must not hide the error that is being reported
  return "?";
}

std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  const std::string module = type_attribute(type, "__module__", "builtins");
  const std::string name = type_attribute(type, "__qualname__", "?");
  return module == "builtins" ? name : module + "." + name;
}

std::string repr_text(nb::handle object) {
  if (has_arrays(object)) return "<" + type_text(object) + ">";
  const nb::object string =
      nb::steal<nb::object>(guarded([&] { return PyObject_Repr(object.ptr()); }));
  if (!string.is_valid()) {
    PyErr_Clear();
    return "<" + type_text(object) + ">";
  }
  return shortened(text(string));
}

std::string shortened(const std::string& shown) {
  if (shown.size() <= kMaxRepr) return shown;
  std::size_t end = kMaxRepr;
  while (end > 0 && (shown[end] & 0xC0) == 0x80) --end;  // not within a UTF-8 sequence
  return shown.substr(0, end) + "...";
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
