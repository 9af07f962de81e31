#pragma once

namespace dlattn::cuda {

// A function of the driver's, as of its CUDA version `since` (12000 for 12.0), found at run time:
// linked against, a machine without a driver could not load the library. Throws DeviceError.
void* driver_function(const char* name, int since);

}  // namespace dlattn::cuda
