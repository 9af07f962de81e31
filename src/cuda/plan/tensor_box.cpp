#include "cuda/plan/tensor_box.h"

#include "core/util/concat.h"

namespace dlattn::cuda {

std::string tma_refusal(const TensorBox& box) {
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;
  const std::int64_t most_bytes = (box.rank == 5 ? kVarlenWrap : kMaxStride) - 16;
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(box.data);
  bool fits = true;
  for (int i = 1; i < 4; ++i) {
    bits |= static_cast<std::uint64_t>(box.strides[i]);
    fits &= static_cast<std::uint64_t>(box.strides[i]) <= static_cast<std::uint64_t>(most_bytes);
  }
  if (fits && bits % 16 == 0) return {};
  if (reinterpret_cast<std::uintptr_t>(box.data) % 16 != 0)
    return core::concat(box.name, " begins at ", box.data, "; accepted: multiples of 16 bytes");
  const char* const names[] = {"column", "row", "head", "batch"};
  for (int i = 1; i < 4; ++i) {
    const std::int64_t stride = box.strides[i];
    if (stride % 16 != 0 || stride < 0 || stride > most_bytes) {
      return core::concat(box.name, " has a ", names[i], " stride of ", stride,
                          " bytes; accepted: multiples of 16 from 0 to ", most_bytes);
    }
  }
  return {};
}

}  // namespace dlattn::cuda
