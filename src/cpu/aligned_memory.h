#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace dlattn::cpu {

// Memory for vectors of any instruction set; `bytes` is a multiple of the alignment. Windows has
// functions of its own for it. Throws std::bad_alloc.
inline char* aligned_memory(std::size_t bytes, std::size_t alignment = 64) {
#if defined(_WIN32)
  void* memory = _aligned_malloc(bytes, alignment);
#else
  void* memory = std::aligned_alloc(alignment, bytes);
#endif
  if (!memory) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

inline void free_aligned(void* memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

}  // namespace dlattn::cpu
