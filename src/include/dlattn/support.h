#pragma once

#include <string>
#include <vector>

#include "dlattn/export.h"

namespace dlattn {

struct Launch;
struct Plan;

struct Support {
  bool ok = false;
  std::vector<std::string> reasons;  // why not; empty if ok
};

DLATTN_API std::string describe(const Plan& plan);      // one field a line
DLATTN_API std::string describe(const Launch& launch);  // operation, kernel and grid, on one line

}  // namespace dlattn
