#include <limits>

#include "core/util/concat.h"
#include "cuda/plan/tensor_refusal.h"

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

std::string page_refusal(const char* name, std::int64_t batch_stride, std::int64_t row_stride,
                         std::int64_t rows, std::int64_t pages) {
  if (pages <= 1 || batch_stride == 0) return {};
  if (row_stride <= 0 || batch_stride < 0 || batch_stride % row_stride != 0) {
    return core::concat(name, " has a batch stride of ", batch_stride,
                        " elements; accepted: ", "multiples of its row stride, ", row_stride);
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();  // of a coordinate
  const std::int64_t page_rows = batch_stride / row_stride;
  if (rows <= kMost && page_rows <= (kMost - rows) / (pages - 1)) return {};
  return core::concat(name, " has ", pages, " pages or entries, ", page_rows,
                      " rows apart; accepted: up to ", kMost, " rows");
}

}  // namespace dlattn::cuda
