# Cross build for 64-bit Arm Linux (Grace, Graviton, Jetson) on another machine:
#
#   cmake -S . -B build/aarch64 -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -DDLATTN_CUDA=OFF -DDLATTN_TESTS=ON
#   cmake --build build/aarch64 && ctest --test-dir build/aarch64 -L cpp
#
# g++-aarch64-linux-gnu compiles and, where it is installed, QEMU runs the test programs. Debian and Ubuntu have both as
# packages, the second as qemu-user or qemu-user-static. On an Arm machine none of this is needed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

find_program(DLATTN_AARCH64_EMULATOR NAMES qemu-aarch64-static qemu-aarch64)
if(DLATTN_AARCH64_EMULATOR)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${DLATTN_AARCH64_EMULATOR};-L;/usr/aarch64-linux-gnu)
endif()
