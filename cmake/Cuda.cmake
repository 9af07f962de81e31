# With DLATTN_CUDA: finds nvcc, settles CMAKE_CUDA_ARCHITECTURES (Archs.cmake), which must be known before the language
# is enabled, and enables CUDA.
if(NOT DLATTN_CUDA)
  return()
endif()

foreach(_folder IN ITEMS "${PROJECT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}")
  if(_folder MATCHES ",")
    message(FATAL_ERROR
      "dlattn: nvcc takes a folder whose name has a comma for two: \"${_folder}\". Build in another folder; "
      "-DDLATTN_CUDA=OFF builds the CPU backend alone, in any.")
  endif()
endforeach()

# CMake itself looks for nvcc in CUDACXX and PATH; toolkits are often in neither.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(CMAKE_CUDA_COMPILER nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH ENV CUDAToolkit_ROOT /usr/local/cuda PATH_SUFFIXES bin
    DOC "CUDA compiler")
  mark_as_advanced(CMAKE_CUDA_COMPILER)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
    message(FATAL_ERROR
      "dlattn: no CUDA compiler found (CMAKE_CUDA_COMPILER, CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda). "
      "Install the CUDA toolkit, 12.0 or later, or set CUDACXX to its nvcc; "
      "-DDLATTN_CUDA=OFF builds the CPU backend alone.")
  endif()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/Archs.cmake)
if(CMAKE_CUDA_COMPILER)
  dlattn_choose_archs(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_COMPILER}")
else()
  dlattn_choose_archs(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDACXX}")
endif()

enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR
    "dlattn: ${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_CUDA_COMPILER_VERSION}; 12.0 or later is needed. "
    "Set CUDACXX to a newer nvcc; -DDLATTN_CUDA=OFF builds the CPU backend alone.")
endif()
if("native" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})  # by number, for info() to report
endif()
