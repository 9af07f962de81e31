#include "torch_kernel.h"

#include <cstring>
#include <exception>
#include <new>
#include <string_view>
#include <type_traits>

#include "gil.h"

namespace dlattn::python {
namespace {

// An array, not a std::string: a thread that ends destroys nothing, so that operators can be called
// until the process has ended.
struct TorchFailure {
  const char* kind = nullptr;  // of the exception's class in Python
  char message[4096] = "";     // cut off where it ends

  void set(const char* name, std::string_view text) {
    kind = name;
    message[text.copy(message, sizeof message - 1)] = '\0';
  }
};
thread_local TorchFailure torch_failure;
static_assert(std::is_trivially_destructible_v<TorchFailure>);

}  // namespace

void forget_failure() noexcept {
  torch_failure.kind = nullptr;
}

void keep_failure() noexcept {
  try {
    throw;
  } catch (const UnsupportedError& error) {
    torch_failure.set("UnsupportedError", error.what());
  } catch (const DeviceError& error) {
    torch_failure.set("DeviceError", error.what());
  } catch (const nb::builtin_exception& error) {  // thrown by wrong_type
    torch_failure.set("TypeError", error.what());
  } catch (const std::bad_alloc&) {
    torch_failure.set("MemoryError", "out of memory");
  } catch (const AllocationError& error) {
    torch_failure.set("AllocationError", error.what());
  } catch (const std::exception& error) {
    torch_failure.set("RuntimeError", error.what());
  }
}

void throw_failure() {
  torch_functions.check(false, "dlattn", "torch_kernel.cpp", 0, torch_failure.message);
}

nb::object torch_ops_failure() {
  if (!torch_failure.kind) return nb::none();
  const char* const message = torch_failure.message;
  return nb::make_tuple(
      torch_failure.kind,
      checked(PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)),
                                   "backslashreplace")));
}

WorkspaceAllocator TorchWorkspace::allocator() {
  return {[](void* self, std::int64_t bytes) {
            auto& workspace = *static_cast<TorchWorkspace*>(self);
            const std::int64_t floats = bytes / size_of(DType::kFloat32);
            Tensor described;
            workspace.memory = empty_tensor("workspace", &floats, 1, DType::kFloat32,
                                            workspace.device, &described);
            return described.data;
          },
          this};
}

void* stream_of(Device device) {
  return device.type == DeviceType::kCuda ? current_cuda_stream(device) : nullptr;
}

}  // namespace dlattn::python
