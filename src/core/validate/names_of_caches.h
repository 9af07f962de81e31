#pragma once

#include <cctype>
#include <string>

#include "dlattn/types.h"

namespace dlattn::core {

// A message in which the words k and v, attention's names of the caches, are k_cache and v_cache:
// where new keys and values are k and v.
inline std::string with_names_of_caches(const std::string& message) {
  const auto in_word = [&](std::size_t at) {
    return at < message.size() &&
           (std::isalnum(static_cast<unsigned char>(message[at])) || message[at] == '_');
  };
  std::string renamed;
  for (std::size_t i = 0; i < message.size(); ++i) {
    const bool is_word =
        (message[i] == 'k' || message[i] == 'v') && !in_word(i + 1) && (i == 0 || !in_word(i - 1));
    renamed += message[i];
    if (is_word) renamed += "_cache";
  }
  return renamed;
}

// Returns the result of `code`. Its errors use those names.
template <typename Code>
auto in_names_of_caches(Code&& code) {
  try {
    return code();
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(with_names_of_caches(error.what()));
  }
}

}  // namespace dlattn::core
