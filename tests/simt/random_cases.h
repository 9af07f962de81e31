#pragma once

#include <vector>

#include "attention_case.h"
#include "value_cases.h"

// Random problems from seeds, for as long as is asked: sizes at the edges of tiles, every layout,
// features combined. Problems are small, since a simulated tile takes tens of milliseconds.
namespace simt {

Case random_case(unsigned seed);

// Reads a test's arguments:
//   [<filter>]                                        its own cases whose line contains the filter
//   --random [<count> [<first seed> [<seconds>]]]     random ones
//   --values [<filter> [<seconds>]]                   those of extreme values
class Arguments {
 public:
  Arguments(int argc, char** argv);

  const char* filter() const { return filter_; }
  double seconds() const { return seconds_; }
  bool values() const { return values_; }

  std::vector<Case> cases(std::vector<Case> own, bool every_value = kEveryValue) const;

 private:
  bool random_ = false, values_ = false;
  const char* filter_ = "";
  unsigned count_ = 40, first_seed_ = 0;
  double seconds_ = 1e9;
};

}  // namespace simt
