#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "harness/block.h"

// nvcuda::wmma for 16 x 16 x 16 products of half or bfloat16 with fp32 accumulators, as the CUDA
// guide documents it:
// - every operation is a collective of the whole warp, all lanes with the same arguments;
// - pointers are multiples of 32 bytes, leading dimensions multiples of 16 bytes and no less than a
// row (or column);
// - which lane holds which element is unspecified. Here it is scrambled, differently for each kind
// of fragment, so that
//   code which assumes a layout computes nonsense;
// - a load or store is plain memory accesses by the lanes, after all have arrived; it orders no
// memory (block.h);
// - a fragment holds NaNs until it is filled or loaded.
namespace nvcuda::wmma {

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
enum layout_t { mem_row_major, mem_col_major };

namespace model {

constexpr int kSize = 16;

// Where the elements of a lane stand in the matrix, row * 16 + column. With 16 elements a lane,
// every element is held by two lanes, as the half fragments of matrix_a and matrix_b are on
// hardware.
template <int kElements>
struct Places {
  std::uint8_t of[simt::kWarpSize][kElements] = {};

  constexpr explicit Places(unsigned seed) {
    for (int copy = 0; copy < kElements / 8; ++copy) {
      for (unsigned i = 0; i < 256; ++i) {
        // Odd factors and xor-shifts are bijections of 8 bits.
        unsigned slot = (i * (2 * seed + 77) + 31 * seed + 101 * copy) & 255;
        slot = (slot ^ (slot >> 3)) * 167 & 255;
        slot ^= slot >> 5;
        of[slot % 32][slot / 32 + 8 * copy] = static_cast<std::uint8_t>(i);
      }
    }
  }
};

template <typename Use, typename T>
constexpr int num_elements() {
  // As crt/mma.h has it: half inputs hold every element twice, bfloat16 inputs and accumulators
  // once.
  return std::is_same_v<T, __half> ? 16 : 8;
}

template <typename Use, typename T>
constexpr unsigned seed() {
  return (std::is_same_v<Use, matrix_a> ? 3 : std::is_same_v<Use, matrix_b> ? 11 : 29) + sizeof(T);
}

template <typename Use, typename T>
inline constexpr Places<num_elements<Use, T>()> kPlaces{seed<Use, T>()};

template <typename T>
T not_a_number() {
  T value;
  std::memset(static_cast<void*>(&value), 0xFF, sizeof value);
  return value;
}

template <typename T>
void check_access(const char* name, const T* pointer, unsigned ldm, int layout) {
  simt::MatrixAccess operand{pointer, ldm, layout};
  simt::warp_collective(name, 0xFFFFFFFFu, simt::combine_matrix_access, &operand);
  if (reinterpret_cast<std::uintptr_t>(pointer) % 32 != 0) {
    simt::die("%s at %p, which is not a multiple of 32 bytes", name,
              static_cast<const void*>(pointer));
  }
  if (ldm * sizeof(T) % 16 != 0)
    simt::die("%s with ldm %u, which is not a multiple of 16 bytes", name, ldm);
  if (ldm < kSize) simt::die("%s with ldm %u, which is less than 16 elements", name, ldm);
}

inline std::int64_t offset(int place, unsigned ldm, bool row) {
  const int r = place / kSize, c = place % kSize;
  return row ? static_cast<std::int64_t>(r) * ldm + c : static_cast<std::int64_t>(c) * ldm + r;
}

}  // namespace model

template <typename Use, int kM, int kN, int kK, typename T, typename Layout = void>
class fragment {
  static_assert(kM == 16 && kN == 16 && kK == 16, "the model has 16 x 16 x 16 products");
  static_assert(std::is_same_v<Use, accumulator>
                    ? std::is_same_v<T, float> && std::is_void_v<Layout>
                    : (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) &&
                          !std::is_void_v<Layout>,
                "the model has half and bfloat16 inputs and float accumulators");

 public:
  using element_type = T;
  enum { num_elements = model::num_elements<Use, T>() };
  T x[num_elements];

  fragment() {
    for (T& element : x) element = model::not_a_number<T>();
  }
};

template <typename Use, typename T, typename Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& f, std::common_type_t<T> value) {
  for (T& element : f.x) element = value;
}

template <typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* pointer, unsigned ldm) {
  static_assert(!std::is_same_v<Use, accumulator>, "an accumulator's load names its layout");
  constexpr bool kRowMajor = std::is_same_v<Layout, row_major>;
  model::check_access("wmma::load_matrix_sync", pointer, ldm, kRowMajor);
  const auto& places = model::kPlaces<Use, T>.of[simt::this_thread().lane];
  for (int i = 0; i < f.num_elements; ++i)
    f.x[i] = pointer[model::offset(places[i], ldm, kRowMajor)];
}

inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float>& f, const float* pointer,
                             unsigned ldm, layout_t layout) {
  model::check_access("wmma::load_matrix_sync", pointer, ldm, layout);
  const auto& places = model::kPlaces<accumulator, float>.of[simt::this_thread().lane];
  for (int i = 0; i < f.num_elements; ++i)
    f.x[i] = pointer[model::offset(places[i], ldm, layout == mem_row_major)];
}

inline void store_matrix_sync(float* pointer, const fragment<accumulator, 16, 16, 16, float>& f,
                              unsigned ldm, layout_t layout) {
  model::check_access("wmma::store_matrix_sync", pointer, ldm, layout);
  const auto& places = model::kPlaces<accumulator, float>.of[simt::this_thread().lane];
  for (int i = 0; i < f.num_elements; ++i)
    pointer[model::offset(places[i], ldm, layout == mem_row_major)] = f.x[i];
}

template <typename T, typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
              const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
              const fragment<accumulator, 16, 16, 16, float>& c) {
  constexpr int kElements = model::num_elements<matrix_a, T>();
  simt::MatrixProduct operand;
  for (int i = 0; i < kElements; ++i) {
    operand.a[i] = static_cast<float>(a.x[i]);
    operand.b[i] = static_cast<float>(b.x[i]);
  }
  for (int i = 0; i < 8; ++i) operand.c[i] = c.x[i];
  const int lane = simt::this_thread().lane;
  operand.places_a = model::kPlaces<matrix_a, T>.of[lane];
  operand.places_b = model::kPlaces<matrix_b, T>.of[lane];
  operand.places_c = model::kPlaces<accumulator, float>.of[lane];
  operand.num_inputs = kElements;
  simt::warp_collective("wmma::mma_sync", 0xFFFFFFFFu, simt::combine_matrix_product, &operand);
  for (int i = 0; i < 8; ++i) d.x[i] = operand.d[i];
}

}  // namespace nvcuda::wmma
