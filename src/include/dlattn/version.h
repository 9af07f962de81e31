#pragma once

// The one place where the version stands: CMake and the Python package read it from here.
#define DLATTN_VERSION "0.1.0"
#define DLATTN_VERSION_MAJOR 0
#define DLATTN_VERSION_MINOR 1
#define DLATTN_VERSION_PATCH 0
