#pragma once

#include <sstream>
#include <string>

namespace dlattn::core {

// A message of its parts, one after the other.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace dlattn::core
