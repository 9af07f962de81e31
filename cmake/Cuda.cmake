# With DLATTN_CUDA: finds nvcc, settles CMAKE_CUDA_ARCHITECTURES (which must be known before the language is enabled)
# and enables CUDA.
if(NOT DLATTN_CUDA)
  return()
endif()

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

# Machine code for these where nvcc knows them, and PTX that any newer GPU compiles when it loads the module.
set(DLATTN_DEFAULT_ARCHS 80 89 90 120)
set(DLATTN_MIN_ARCH 80)  # cp.async

set(_archs "${CMAKE_CUDA_ARCHITECTURES}")
if(NOT _archs AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
  set(_archs "$ENV{CUDAARCHS}")
endif()
if(NOT _archs)
  set(_nvcc "${CMAKE_CUDA_COMPILER}")
  if(NOT _nvcc)
    set(_nvcc "$ENV{CUDACXX}")
  endif()
  execute_process(COMMAND ${_nvcc} --list-gpu-code OUTPUT_VARIABLE _known)
  foreach(_arch ${DLATTN_DEFAULT_ARCHS})
    if(_known MATCHES "sm_${_arch}[^0-9a-z]")
      list(APPEND _archs ${_arch}-real)
    endif()
  endforeach()
  list(APPEND _archs 89-virtual)
endif()
foreach(_arch ${_archs})
  if(_arch STREQUAL "native")
    continue()
  endif()
  if(NOT _arch MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS DLATTN_MIN_ARCH)
    message(FATAL_ERROR
      "dlattn: CMAKE_CUDA_ARCHITECTURES has \"${_arch}\"; the kernels need compute capability 8.0 or later. "
      "Accepted: a list of 80, 86, 89, 90, ... with -real (machine code) or -virtual (PTX) or neither (both), "
      "or native. Leave it unset for the default.")
  endif()
endforeach()
set(CMAKE_CUDA_ARCHITECTURES ${_archs})

enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR
    "dlattn: ${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_CUDA_COMPILER_VERSION}; 12.0 or later is needed. "
    "Set CUDACXX to a newer nvcc; -DDLATTN_CUDA=OFF builds the CPU backend alone.")
endif()
if("native" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})  # by number, for info() to report
endif()
