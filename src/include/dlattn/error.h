#pragma once

#include <stdexcept>

#include "dlattn/export.h"

namespace dlattn {

// The exception of every failing call of this library.
class DLATTN_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
};

// An argument is wrong, or no kernel provides what is asked for. The message names the argument,
// the value got and what is accepted. Thrown before anything is launched.
class DLATTN_API UnsupportedError : public Error {
 public:
  using Error::Error;
  ~UnsupportedError() override;
};

// The device, its driver or a launch failed.
class DLATTN_API DeviceError : public Error {
 public:
  using Error::Error;
  ~DeviceError() override;
};

}  // namespace dlattn
