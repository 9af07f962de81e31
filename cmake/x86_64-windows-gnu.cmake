# Cross build of the CPU backend for 64-bit Windows, by the clang and MinGW of zig, which `pip install ziglang` brings:
#
#   cmake -S . -B build/windows -G Ninja --toolchain cmake/x86_64-windows-gnu.cmake -DDLATTN_TESTS=ON
#   cmake --build build/windows && ctest --test-dir build/windows -L cpp
#
# Where wine is installed, it runs the test programs.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)

find_program(DLATTN_ZIG NAMES zig)
if(NOT DLATTN_ZIG)  # then it is inside the Python package
  find_program(_python NAMES python3 python REQUIRED)
  execute_process(COMMAND ${_python} -c "import ziglang, os; print(os.path.dirname(ziglang.__file__), end='')"
                  OUTPUT_VARIABLE _zig COMMAND_ERROR_IS_FATAL ANY)
  find_program(DLATTN_ZIG NAMES zig HINTS ${_zig} REQUIRED)
endif()
set(CMAKE_C_COMPILER ${DLATTN_ZIG} cc -target x86_64-windows-gnu)
set(CMAKE_CXX_COMPILER ${DLATTN_ZIG} c++ -target x86_64-windows-gnu)
foreach(_language C CXX)
  set(CMAKE_${_language}_ARCHIVE_CREATE "${DLATTN_ZIG} ar qc <TARGET> <OBJECTS>")
  set(CMAKE_${_language}_ARCHIVE_APPEND "${DLATTN_ZIG} ar q <TARGET> <OBJECTS>")
  set(CMAKE_${_language}_ARCHIVE_FINISH "${DLATTN_ZIG} ranlib <TARGET>")
endforeach()

find_program(DLATTN_WINE NAMES wine64 wine)
if(DLATTN_WINE)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${DLATTN_WINE})
endif()
