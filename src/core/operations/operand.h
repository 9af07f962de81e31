#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "dlattn/tensor.h"

// How the tensors and sizes of an operation are declared: each once, in the operation's table
// (forward.h, backward.h, append.h and others beside this file). Checks of sizes, addresses,
// strides and shared memory, the C API, the Python module and the faces for torch and JAX loop over
// it.
namespace dlattn::core {

enum class Kind : std::uint8_t {
  kTensor,   // a BasicTensorView
  kTensors,  // an array of them, sizes['N'] of which are used
  kList,     // a pointer to elements that lie side by side
  kCount,    // a size up to kMaxCount
  kLength,   // a size up to kMaxLength
  kNumber,   // a size that only the operation's own checks know
};

// The type of a tensor's elements.
enum class Elements : std::uint8_t {
  kAny,     // the view's dtype, of attention's dtypes
  kCached,  // the same, or kInt8
  kFloat32,
  kInt32,
  kBool,  // a byte each
  kByte,
  kSlots,  // sizes['x'] bytes each
};

// Properties of a tensor, as bits.
enum Trait : std::uint16_t {
  // Which functions of Python take it as an optional argument.
  kInAttention = 1,
  kInVarlen = 2,
  kInKvcache = 4,
  kInTorch = 8,     // torch.ops.dlattn.attention and attention_varlen take it
  kIsFeature = 16,  // the table of what kernels support has it
  kInBoth = kInAttention | kInVarlen,
  kInAll = kInBoth | kInKvcache | kInTorch | kIsFeature,

  kRequired = 32,  // null is refused, unless the tensor has no elements
  kWritten = 64,
  kSummed = 128,  // a dimension of stride 0 has one element, the sum over it
};

// Which stride of a view a dimension has, as an index into View::strides.
constexpr int stride_index(char letter) {
  const std::string_view rows = "sSTR", heads = "hgn", none;
  return rows.find(letter) != none.npos    ? 1
         : heads.find(letter) != none.npos ? 2
         : letter == 't'                   ? 3
                                           : 0;
}

constexpr const char* name_of_dim(char letter) {
  const char* const names[] = {"batch", "seqlen", "num_heads", "seqlen_k"};
  return letter == 's' ? "seqlen_q" : names[stride_index(letter)];
}

// One row of a table.
//
// `dims` has a letter for each dimension. Those after a space have elements side by side; the view
// has a stride for each of the others. The operation's sizes_of() gives their sizes:
//   b sequences             s seqlen_q      t seqlen_k       h num_heads      d head_dim
//   B batch of rows of q    S rows of q     T rows of k, v   g num_heads_kv   e head_dim of v
//   C batch of rows of k    (B and C: all sequences of a varlen batch are one; C: entries, pages)
//   n heads with a q_descale of their own   o sequences + 1  p pages of a sequence
//   R rows and c columns of rotary tables   m, w elements    N parts of an array
struct Operand {
  const char* name;
  Kind kind;
  std::uint16_t offset;    // of its field in the parameters
  std::uint16_t c_offset;  // of its field in the struct of dlattn/c.h; 0: that has another form
  char dims[6] = {};       // the first `num_strides` have a stride
  std::uint8_t strides[4] = {};  // which of a view's strides it is
  std::uint8_t num_strides = 0;
  char run = 0;  // the letter of the dimension after them; 0: none
  Elements elements;
  std::uint16_t traits;    // of Trait
  std::int64_t least = 0;  // of a size

  constexpr bool is_tensor() const { return kind <= Kind::kList; }
  // Whether its columns have a stride, as those of bias have.
  constexpr bool has_columns() const { return num_strides == 4; }
  constexpr bool has(int trait) const { return (traits & trait) != 0; }

  constexpr Operand(const char* name_, Kind kind_, std::size_t offset_, std::size_t c_offset_,
                    const char* dims_, Elements elements_ = Elements::kAny, int traits_ = 0)
      : name(name_),
        kind(kind_),
        offset(static_cast<std::uint16_t>(offset_)),
        c_offset(static_cast<std::uint16_t>(c_offset_)),
        elements(elements_),
        traits(static_cast<std::uint16_t>(traits_)) {
    for (int i = 0; dims_[i]; ++i) dims[i] = dims_[i];
    for (; dims[num_strides] && dims[num_strides] != ' '; ++num_strides)
      strides[num_strides] = static_cast<std::uint8_t>(stride_index(dims[num_strides]));
    if (dims[num_strides]) run = dims[num_strides + 1];
  }
  constexpr Operand(const char* name_, Kind kind_, std::size_t offset_, std::size_t c_offset_,
                    std::int64_t least_ = 0)
      : Operand(name_, kind_, offset_, c_offset_, "") {
    least = least_;
  }
};

// A field of the parameters and of the struct of dlattn/c.h, which have it under the same name; one
// with a name of its own in messages; one of the parameters alone.
#define DLATTN_FIELD(kind, Params, Struct, name) DLATTN_FIELD_AS(#name, kind, Params, Struct, name)
#define DLATTN_FIELD_AS(text, kind, Params, Struct, name) \
  text, Kind::kind, offsetof(Params, name), offsetof(Struct, name)
#define DLATTN_FIELD_OF_CPP(kind, Params, name) #name, Kind::kind, offsetof(Params, name), 0

// A table: sizes first, then tensors.
struct Operands {
  const Operand* sizes;
  const Operand* tensors;
  const Operand* end;

  template <std::size_t kCount>
  constexpr Operands(const Operand (&table)[kCount])
      : sizes(table), tensors(table), end(table + kCount) {
    while (!tensors->is_tensor()) ++tensors;
  }
};

template <std::size_t kCount>
constexpr int num_tensors(const Operand (&table)[kCount]) {
  const Operands rows(table);
  return static_cast<int>(rows.end - rows.tensors);
}

// The tensor of that name; null: there is none.
constexpr const Operand* find(const Operands& table, std::string_view name) {
  for (const Operand* operand = table.tensors; operand < table.end; ++operand) {
    if (name == operand->name) return operand;
  }
  return nullptr;
}

// The size of each dimension of a call's tensors, by letter.
class Sizes {
 public:
  std::int64_t& operator[](char letter) { return sizes_[letter - 'A']; }
  std::int64_t operator[](char letter) const { return sizes_[letter - 'A']; }

 private:
  std::int64_t sizes_['z' - 'A' + 1];  // the letters of the operation's table are set
};

// A tensor of the parameters is accessed by its bytes, whatever its elements are: the layout of any
// BasicTensorView.
constexpr std::size_t stride_offset(int index) {
  return offsetof(TensorView, batch_stride) + index * sizeof(std::int64_t);
}
static_assert(offsetof(TensorView, data) == 0 &&
              offsetof(TensorView, row_stride) == stride_offset(1) &&
              offsetof(TensorView, head_stride) == stride_offset(2) &&
              offsetof(TensorView, col_stride) == stride_offset(3));

template <typename T>
T load(const void* params, std::size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(params) + offset, sizeof value);
  return value;
}
template <typename T>
void store(void* params, std::size_t offset, const T& value) {
  std::memcpy(static_cast<char*>(params) + offset, &value, sizeof value);
}

// A tensor's field in the parameters; of an array that of part `n`.
inline const char* field_of(const Operand& operand, const void* params, std::int64_t n = 0) {
  return static_cast<const char*>(params) + operand.offset + n * sizeof(TensorView);
}

}  // namespace dlattn::core
