#pragma once

// DLATTN_API marks the symbols of the public C++ API. Consumers of the static library define
// DLATTN_STATIC, which the CMake target does for them.
#if defined(DLATTN_STATIC)
#define DLATTN_API
#elif defined(_WIN32) && defined(dlattn_EXPORTS)  // CMake's, of the library's own sources
#define DLATTN_API __declspec(dllexport)
#elif defined(_WIN32)
#define DLATTN_API __declspec(dllimport)
#else
#define DLATTN_API __attribute__((visibility("default")))
#endif
