#pragma once

#include <cstdint>
#include <cstring>

// Accesses that the sanitizers see.
namespace simt {

inline bool in_words(const void* memory, unsigned bytes) {
  return (reinterpret_cast<std::uintptr_t>(memory) | bytes) % sizeof(std::uint64_t) == 0;
}

// Shows a read.
inline void touch(const void* memory, unsigned bytes) {
  const volatile unsigned char* byte = static_cast<const unsigned char*>(memory);
  const volatile std::uint64_t* word = static_cast<const std::uint64_t*>(memory);
  if (in_words(memory, bytes)) {
    for (unsigned i = 0; i < bytes / 8; ++i) (void)word[i];
  } else {
    for (unsigned i = 0; i < bytes; ++i) (void)byte[i];
  }
}

// A write. The sanitizers do not see a call of memset or memcpy with a constant size that the
// compiler expands itself.
template <typename Word>
void overwrite_words(void* dst, const void* src, unsigned bytes, Word otherwise) {
  volatile Word* to = static_cast<Word*>(dst);
  for (unsigned i = 0; i < bytes / sizeof(Word); ++i) {
    Word word = otherwise;
    if (src) std::memcpy(&word, static_cast<const Word*>(src) + i, sizeof word);
    to[i] = word;
  }
}
inline void overwrite(void* dst, const void* src, unsigned bytes, std::uint32_t otherwise) {
  if (in_words(dst, bytes))
    return overwrite_words(dst, src, bytes, std::uint64_t{otherwise} << 32 | otherwise);
  overwrite_words(dst, src, bytes, otherwise);
}

// A number that changes with the 16 bytes at `memory`, which are read.
inline std::uint64_t checksum(const void* memory) {
  const volatile std::uint64_t* words = static_cast<const std::uint64_t*>(memory);
  return words[0] * 0x9E3779B97F4A7C15ull ^ (words[1] + 0x7F4A7C15ull) * 0xC2B2AE3D27D4EB4Full;
}

}  // namespace simt
