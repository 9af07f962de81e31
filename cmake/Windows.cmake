# Windows has the CPU backend, compiled by clang. Its CUDA launches and its Python module have never been compiled there;
# g++ does not align vectors of 256 bits on the stack (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=54412), and MSVC's
# compiler has no vectors as the kernels are written with.
set(_accepted "Accepted: -DDLATTN_CUDA=OFF -DDLATTN_PYTHON=OFF and clang for MinGW, as cmake/x86_64-windows-gnu.cmake "
              "has it; or Linux, also in WSL 2.")
if(DLATTN_CUDA OR DLATTN_PYTHON)
  message(FATAL_ERROR "dlattn: DLATTN_CUDA is ${DLATTN_CUDA} and DLATTN_PYTHON is ${DLATTN_PYTHON}, and on Windows there "
                      "is the CPU backend's library alone. " ${_accepted})
endif()
if(MSVC OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "dlattn: the C++ compiler is ${CMAKE_CXX_COMPILER_ID}'s, whose vectors are not those that the "
                      "kernels need on Windows. " ${_accepted})
endif()
