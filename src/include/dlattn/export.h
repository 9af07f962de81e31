#pragma once

// DLATTN_API marks the symbols of the public C++ API. Consumers of the static library define
// DLATTN_STATIC, which the CMake target does for them.
#if defined(DLATTN_STATIC)
#define DLATTN_API
#else
#define DLATTN_API __attribute__((visibility("default")))
#endif
