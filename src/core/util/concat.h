#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace dlattn::core {

// Text in which numbers are written as in C++, whatever locale the program has made its own: one
// may group digits, so that 1024 heads would read as 1.024.
inline std::ostringstream text_stream() {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  return out;
}

// A message of its parts, one after the other.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out = text_stream();
  (out << ... << parts);
  return out.str();
}

}  // namespace dlattn::core
