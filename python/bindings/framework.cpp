#include "framework.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dlattn/device.h"
#include "errors.h"
#include "gil.h"
#include "names.h"
#include "options.h"

namespace dlattn::python {
namespace {

bool exchange_api_on = true;

struct Known {
  std::unique_ptr<TensorType> type;
  nb::object reference;  // weak: removes the entry when the Python type dies
};
// Never destroyed: its references outlive the interpreter's shutdown. The GIL guards it, so nothing
// of Python may run while an iterator into it is held.
auto& cache = *new std::unordered_map<PyObject*, Known>;
// The entry that was found last, as a call's tensors are mostly of one type.
struct {
  PyObject* type = nullptr;
  const TensorType* known = nullptr;
} latest;

nb::handle frameworks;  // the module dlattn.frameworks

// Called by a weak reference when its type is gone: another one may be made at the same address.
PyObject* forget(PyObject*, PyObject* reference) {
  Known known;  // let go of when the cache is whole again
  for (auto at = cache.begin(); at != cache.end(); ++at) {
    if (at->second.reference.ptr() != reference) continue;
    if (latest.type == at->first) latest = {};
    known = std::move(at->second);
    cache.erase(at);
    break;
  }
  Py_RETURN_NONE;
}

PyMethodDef forget_method = {"forget", forget, METH_O, nullptr};

nb::object weak_reference(nb::handle type) {
  const nb::object function =
      nb::steal<nb::object>(PyCFunction_NewEx(&forget_method, nullptr, nullptr));
  if (!function.is_valid()) throw nb::python_error();
  nb::object reference = nb::steal<nb::object>(PyWeakref_NewRef(type.ptr(), function.ptr()));
  if (!reference.is_valid()) throw nb::python_error();
  return reference;
}

const dlpack::ExchangeApi* find_exchange_api(nb::handle type, const TensorType& known) {
  // NumPy's arrays need less by their own interface; JAX has an order of its own to keep.
  if (!exchange_api_on || known.numpy || known.cuda_array || known.deferred) return nullptr;
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* header = static_cast<const dlpack::ExchangeApiHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header && header->version.major != dlpack::kMajorVersion) header = header->previous;
  return reinterpret_cast<const dlpack::ExchangeApi*>(header);
}

// A torch tensor's memory does not tell the whole truth about it.
void check_torch(nb::handle object, const TorchState& state, const char* name, bool maybe_dual,
                 bool maybe_complex) {
  if (attribute(object, names.requires_grad).ptr() == Py_True &&
      nb::cast<bool>(call_method(frameworks, "torch_grad_enabled"))) {
    unsupported(name,
                " requires grad, and this function has no gradients; accepted: a tensor without "
                "requires_grad. dlattn.torch.attention has gradients; else call this under "
                "torch.no_grad() or pass ",
                name, ".detach()");
  }
  if (maybe_dual) state.check_tangent(object, name);
  if (maybe_complex && call_method(object, names.is_conj).ptr() == Py_True) {
    unsupported(name, " is a conjugated view; accepted: a plain real tensor");
  }
  if (state.is_negated(object)) {
    unsupported(name, " is a negated view; accepted: a plain tensor, ", name, ".resolve_neg()");
  }
}

void check_device(const char* name, Device device, const Target& target) {
  python::check_device(name, device, target.device, target.name);
}

// A tensor that its own library refuses to describe is not a dense tensor of numbers, but sparse,
// quantised, traced, ...
template <typename Export>
auto exported(nb::handle object, const char* name, Export&& export_it) {
  try {
    return export_it();
  } catch (nb::python_error& error) {
    if (is_own(error)) throw;
    if (!error.matches(PyExc_BufferError) && !error.matches(PyExc_RuntimeError) &&
        !error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) {
      throw;
    }
    const std::string why = text(error.value());
    wrong_type_from(
        error,
        concat(name, ": ", type_text(object), " cannot be taken in through DLPack (",
               why.substr(0, why.find('\n')), "); accepted: a dense tensor on the CPU or on CUDA"));
  }
}

Tensor read_cuda_array(nb::handle object, const TensorType& type, const char* name) {
  return from_cuda_array(object, call_method(type.adapter, "describe", object, name), name);
}

// Whether `value` is, or stands for, an int >= 0 that fits.
bool read_index(nb::handle value, std::int32_t* index) {
  if (!value.is_valid() || PyUnicode_Check(value.ptr())) return false;
  // Members of an enumeration need not be ints.
  const nb::object number =
      nb::steal<nb::object>(guarded([&] { return PyNumber_Long(value.ptr()); }));
  int overflow = 0;
  const long long wide =
      number.is_valid() ? PyLong_AsLongLongAndOverflow(number.ptr(), &overflow) : -1;
  *index = static_cast<std::int32_t>(wide);
  return !overflow && wide >= 0 && wide <= INT32_MAX;
}

dlpack::DLDevice dlpack_device(nb::handle object, const char* name) {
  const nb::object pair =
      exported(object, name, [&] { return call_method(object, "__dlpack_device__"); });
  const auto item = [&](int i) {
    return nb::steal<nb::object>(guarded([&] { return PySequence_GetItem(pair.ptr(), i); }));
  };
  dlpack::DLDevice device{};
  const auto is_unnumbered_host = [&](nb::handle id) {  // Paddle's CPU has no number
    return id.is_none() && (device.type == dlpack::kCpu || device.type == dlpack::kCudaHost);
  };
  const bool fits = PySequence_Check(pair.ptr()) && !PyUnicode_Check(pair.ptr()) &&
                    guarded([&] { return PySequence_Size(pair.ptr()); }) == 2 &&
                    read_index(item(0), &device.type) &&
                    (is_unnumbered_host(item(1)) || read_index(item(1), &device.id));
  if (!fits) {
    PyErr_Clear();
    wrong_type(name, ": its __dlpack_device__ returned ", repr_text(pair),
               "; accepted: a pair (device type, device id) of int >= 0");
  }
  return device;
}

// Errors that an allocator reports through a callback, which may hold no Python state.
void set_allocation_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = concat(kind, ": ", message);
}

}  // namespace

void register_frameworks() {
  frameworks = nb::module_::import_("dlattn.frameworks").release();
}

const TensorType& tensor_type(nb::handle object, const char* name) {
  const nb::handle type = object.type();
  if (type.ptr() == latest.type) return *latest.known;
  const auto found = cache.find(type.ptr());
  if (found != cache.end()) {
    latest = {type.ptr(), found->second.type.get()};
    return *latest.known;
  }

  auto made = std::make_unique<TensorType>();
  made->adapter = call_method(frameworks, "find", type, name, object);
  const std::string kind = text(nb::object(made->adapter.attr("name")));
  made->torch = kind == "torch";
  made->paddle = kind == "paddle";
  made->numpy = kind == "numpy";
  made->plain = nb::cast<bool>(call_method(frameworks, "is_plain", type));
  made->cuda_array = kind == "cuda_array";
  made->deferred = kind == "jax";
  made->gives_workspace = nb::cast<bool>(made->adapter.attr("gives_workspace"));
  made->api = find_exchange_api(type, *made);
  if (made->torch) {
    made->torch_state = TorchState(made->adapter);
    load_torch(text(nb::object(made->adapter.attr("folder"))));
  }
  nb::object reference = weak_reference(type);
  // That code, or another thread, may have added the same type meanwhile: its entry then stays.
  const auto at = cache.try_emplace(type.ptr(), Known{std::move(made), std::move(reference)});
  return *at.first->second.type;
}

void use_exchange_api(bool on) {
  exchange_api_on = on;
  // A copy: find_exchange_api may run Python code, which may change the cache.
  std::vector<std::pair<nb::object, TensorType*>> all;
  for (const auto& [type, known] : cache) all.emplace_back(nb::borrow(type), known.type.get());
  for (const auto& [type, known] : all) known->api = find_exchange_api(type, *known);
}

Target make_target(nb::handle like, const char* name) {
  Target target;
  target.like = like;
  target.like_type = nb::borrow(like.type());
  target.name = name;
  target.type = &tensor_type(like, name);
  if (target.type->numpy) return target;
  if (target.type->torch) {
    target.type->torch_state.check_modes(name);
    target.forward_ad = target.type->torch_state.in_forward_ad();
  }
  if (target.type->api) {
    target.lent = exported(like, name,
                           [&] { return from_exchange_api(*target.type->api, like, name, false); });
    target.device = target.lent.device;
  } else if (target.type->cuda_array) {
    target.lent = read_cuda_array(like, *target.type, name);
    target.device = target.lent.device;
  } else {
    call_method(target.type->adapter, "check", like, name);
    target.device = to_device(name, dlpack_device(like, name));
  }
  return target;
}

void set_stream(nb::handle stream, Target* target) {
  if (target->device.type == DeviceType::kCpu) {
    if (stream.is_none()) return;
    unsupported("stream is ", repr_text(stream), "; accepted: None, as ", target->name,
                " is on the CPU");
  }
  if (!stream.is_none()) {
    target->stream = parse_stream(stream);
    target->lent = Tensor();
  } else if (target->type->cuda_array) {
    target->stream = target->lent.ready_on;  // null: the legacy default stream
  } else if (target->type->api) {
    if (target->type->api->current_stream(dlpack::kCuda, target->device.index, &target->stream)) {
      throw nb::python_error();
    }
  } else {
    target->stream = parse_stream(
        call_method(target->type->adapter, "current_stream", target->like, target->device.index));
  }
}

namespace {

Tensor import_tensor(nb::handle object, const TensorType& type, const char* name,
                     const Target& target, bool to_write) {
  if (type.numpy) {
    check_device(name, {}, target);
    return from_array_struct(object, name);
  }
  if (type.cuda_array) {
    Tensor tensor =
        target.lent.owner.is(object) ? target.lent : read_cuda_array(object, type, name);
    tensor.name = name;
    // A tensor without elements may be on any device.
    if (tensor.num_elements() == 0 && target.device.type == DeviceType::kCuda)
      tensor.device = target.device;
    check_device(name, tensor.device, target);
    return tensor;
  }
  bool maybe_dual = target.forward_ad;
  if (type.torch && !target.type->torch) {
    type.torch_state.check_modes(name);
    maybe_dual = type.torch_state.in_forward_ad();
  }
  // An exchange API does not order streams. That is right for the framework whose stream this is,
  // and for memory of the CPU.
  if (type.api && (type.api == target.type->api || target.device.type == DeviceType::kCpu)) {
    if (type.paddle) call_method(type.adapter, "check", object, name);
    Tensor tensor = exported(object, name, [&] {
      // Only an owning export tells whether memory is read-only; torch's never is.
      Tensor borrowed = object.is(target.lent.lender) && !to_write
                            ? target.lent
                            : from_exchange_api(*type.api, object, name, to_write && !type.torch);
      borrowed.name = name;
      if (type.torch)
        check_torch(object, type.torch_state, name, maybe_dual,
                    borrowed.dtype.code == dlpack::kComplex);
      return borrowed;
    });
    check_device(name, tensor.device, target);
    return tensor;
  }
  if (type.torch)
    exported(object, name, [&] { check_torch(object, type.torch_state, name, maybe_dual, true); });
  call_method(type.adapter, "check", object, name);
  check_device(name, to_device(name, dlpack_device(object, name)), target);
  const nb::object stream =
      target.device.type == DeviceType::kCpu
          ? nb::none()
          : nb::object(nb::int_(reinterpret_cast<std::uintptr_t>(target.stream)));
  const nb::object capsule =
      exported(object, name, [&] { return call_method(frameworks, "export", object, stream); });
  Tensor tensor = from_capsule(capsule, name);
  if (!same(tensor.device, target.device)) {
    unsupported(name, " is on ", device_text(tensor.device),
                "; accepted: ", device_text(target.device), ", as its own __dlpack_device__ says");
  }
  return tensor;
}

}  // namespace

Tensor import_tensor(nb::handle object, const char* name, const Target& target, bool to_write) {
  const nb::object held = nb::borrow(object.type());  // an object may change its class meanwhile
  const TensorType& type = tensor_type(object, name);
  Tensor tensor = import_tensor(object, type, name, target, to_write);
  tensor.may_run_code = !type.plain || (type.torch && !type.api);
  return tensor;
}

void wait_for_owners(const Tensor* first, const Tensor* last, const Target& target) {
  for (; first != last; ++first) {
    if (first->ready_on) wait_for_stream(target.device, target.stream, first->ready_on);
  }
}

void mark_modified(nb::handle object, const char* name) {
  const TensorType& type = tensor_type(object, name);
  if (type.torch) type.torch_state.increment_version(object);
  if (type.paddle) call_method(type.adapter, "mark_modified", object);
}

namespace {

nb::object tuple_of(const std::int64_t* numbers, int count) {
  nb::object tuple = checked(PyTuple_New(count));
  for (int i = 0; i < count; ++i)
    PyTuple_SetItem(tuple.ptr(), i, checked(PyLong_FromLongLong(numbers[i])).release().ptr());
  return tuple;
}

// A new numpy.ndarray.
nb::object empty_array(const TensorType& type, const nb::object& sizes, DType dtype) {
  nb::object& maker = type.empty_arrays[static_cast<int>(dtype)];
  if (!maker.is_valid()) maker = call_method(type.adapter, "empty_of", to_string(dtype));
  const nb::object held = maker;
  return call(held, sizes);
}

}  // namespace

Allocation::Allocation(Allocation&& other) noexcept
    : tensor(std::move(other.tensor)),
      managed(other.managed),
      torch(std::move(other.torch)),
      object(std::move(other.object)) {
  other.managed = nullptr;
}

Allocation::~Allocation() {
  if (managed && managed->deleter) managed->deleter(managed);
}

nb::object allocate_workspace(const Target& target, std::int64_t bytes, nb::handle stream) {
  const nb::object settled =
      stream.is_none() ? nb::none()
                       : nb::object(nb::int_(reinterpret_cast<std::uintptr_t>(target.stream)));
  return call_method(target.type->adapter, "workspace", target.like, bytes, target.device.index,
                     settled);
}

namespace {

// Whether a tensor is made by torch's C ABI. That takes half the time of its exchange API, which
// makes a tensor, a DLPack tensor around it, and of that a second one. A large tensor takes longer
// to compute than to make, and where memory is short the C ABI writes to stderr before it fails.
bool is_made_by_c_abi(const Target& target, const std::int64_t* shape, int ndim, DType dtype) {
  constexpr std::int64_t kMostBytes = 16 << 20;
  if (!target.type->api || !target.type->torch || !torch_functions.to_object) return false;
  std::int64_t bytes = size_of(dtype);
  for (int i = 0; i < ndim; ++i) {
    if (__builtin_mul_overflow(bytes, shape[i], &bytes)) return false;
  }
  return bytes <= kMostBytes;
}

}  // namespace

Allocation allocate(const Target& target, const char* name, const std::int64_t* shape, int ndim,
                    DType dtype) {
  Allocation made;
  if (is_made_by_c_abi(target, shape, ndim, dtype)) {
    try {
      made.torch = empty_tensor(name, shape, ndim, dtype, target.device, &made.tensor);
    } catch (const AllocationError&) {  // the exchange API gives torch's own words for it
    }
    if (made.torch.get()) return made;
  }
  if (target.type->api) {
    dlpack::DLTensor prototype{};
    prototype.device = to_dlpack(target.device);
    prototype.ndim = ndim;
    prototype.dtype = to_dlpack(dtype);
    prototype.shape = const_cast<std::int64_t*>(shape);
    std::string error;
    if (target.type->api->allocate(&prototype, &made.managed, &error, set_allocation_error)) {
      if (PyErr_Occurred()) throw nb::python_error();
      // The framework's own exception keeps its class, as torch.OutOfMemoryError.
      call_method(target.type->adapter, names.empty, target.like, tuple_of(shape, ndim),
                  to_string(dtype));
      throw std::runtime_error(concat("allocating ", name, " failed: ", error));
    }
    const dlpack::DLTensor& tensor = made.managed->tensor;
    made.tensor.name = name;
    made.tensor.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    made.tensor.dtype = tensor.dtype;
    made.tensor.device = target.device;
    made.tensor.ndim = ndim;
    std::int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      made.tensor.shape[i] = shape[i];
      made.tensor.strides[i] = tensor.strides ? tensor.strides[i] : stride;
      stride *= shape[i];
    }
    return made;
  }
  const nb::object sizes = tuple_of(shape, ndim);
  if (target.type->numpy) {
    made.object = empty_array(*target.type, sizes, dtype);
  } else if (target.type->cuda_array) {
    made.object =
        call_method(target.type->adapter, "empty_on", target.like, sizes, to_string(dtype),
                    target.device.index, nb::int_(reinterpret_cast<std::uintptr_t>(target.stream)));
  } else {
    made.object =
        call_method(target.type->adapter, names.empty, target.like, sizes, to_string(dtype));
  }
  made.tensor = import_tensor(made.object, name, target);
  return made;
}

nb::object take(const Target& target, Allocation* allocation) {
  if (allocation->torch.get()) return object_of(allocation->torch);
  if (!allocation->managed) return allocation->object;
  void* object = nullptr;
  dlpack::ManagedTensorVersioned* managed = allocation->managed;
  allocation->managed = nullptr;  // the import owns it from here, even if it fails
  if (target.type->api->import_managed(managed, &object)) throw nb::python_error();
  return nb::steal<nb::object>(static_cast<PyObject*>(object));
}

}  // namespace dlattn::python
