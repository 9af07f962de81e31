# Chooses the architectures to compile for, from what the user says, else from the GPUs of this machine:
#
#   CMAKE_CUDA_ARCHITECTURES, or CUDAARCHS in the environment: as CMake reads it
#   DLATTN_ARCHS, a CMake variable or in the environment:
#     all      machine code for every GPU that the kernels know, and PTX for newer ones; what a release has
#     native   machine code for the GPUs of this machine, and PTX for newer ones
#     89;90    machine code for those, and PTX for newer ones
#     common   machine code for 8.9, of 9.0 the kernels that are for it alone, and PTX for all others
#   none of them: native where there is a GPU, else common
include_guard()

set(DLATTN_MIN_ARCH 80)  # cp.async
set(DLATTN_ALL_ARCHS 80 89 90 120)  # 8.6 and 8.7 run the code for 8.0

# A release has machine code for all GPUs up to 9.0. Its PTX is for newer ones, and 8.9 is the nearest relative of most
# of them: tensor cores too slow to feel an mbarrier (cuda/tile/stages.cuh).
set(DLATTN_ALL_PTX 89-virtual)
# A list has the PTX of the oldest that it names, as native has: it takes no run of the compiler of its own. Where this
# nvcc knows none of this machine's GPUs, PTX serves them all: what the kernels ask of __CUDA_ARCH__ is how stages are
# handed over (stages.cuh), which decides on speed alone, and for instructions of 8.9 and 9.0, which plans and launches
# use only where the code that runs has them (DeviceInfo::code, cuda/launch.cuh).
set(DLATTN_OTHER_PTX ${DLATTN_MIN_ARCH}-virtual)
# A machine without a GPU builds for another one: in few CPU seconds, and so that every GPU is served. Two kinds of PTX,
# because 8.9 is the first that has fp8; only files with fp8 are compiled twice (dlattn_code_flags). Kernels for 9.0
# alone have machine code, since PTX for 9.0a serves nothing else; they are the fast ones there.
set(DLATTN_COMMON_ARCHS 89-real 80-virtual 89-virtual)
set(DLATTN_COMMON_FAMILY_ARCHS 90a)

# The compute capabilities of this machine's GPUs, times ten; empty where none is found. NVIDIA's tools are asked, for
# nothing here may need a framework: nvidia-smi, which comes with the driver, or nvcc's own query.
function(_dlattn_native_archs variable nvcc)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status STREQUAL "0" OR NOT answer MATCHES "[0-9]")
    unset(path)
    find_program(path "${nvcc}" NO_CACHE)
    get_filename_component(path "${path}" REALPATH)
    get_filename_component(folder "${path}" DIRECTORY)
    execute_process(COMMAND ${folder}/__nvcc_device_query OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE status)
    if(NOT status STREQUAL "0")
      set(answer "")
    endif()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.?[0-9]" archs "${answer}")
  list(TRANSFORM archs REPLACE "\\." "")
  list(REMOVE_DUPLICATES archs)
  list(SORT archs COMPARE NATURAL)
  set(${variable} ${archs} PARENT_SCOPE)
endfunction()

# The newest architecture of `known` whose machine code runs on `arch`; empty if none does.
function(_dlattn_machine_code variable arch known)
  string(REGEX REPLACE ".$" "" major ${arch})
  set(best "")
  foreach(candidate ${known})
    string(REGEX REPLACE ".$" "" candidate_major ${candidate})
    if(candidate_major EQUAL major AND candidate LESS_EQUAL arch AND candidate GREATER_EQUAL DLATTN_MIN_ARCH)
      set(best ${candidate})  # `known` ascends
    endif()
  endforeach()
  set(${variable} ${best} PARENT_SCOPE)
endfunction()

function(_dlattn_capabilities variable)  # "89;120" as "8.9, 12.0"
  list(TRANSFORM ARGN REPLACE "^([0-9]+)([0-9])$" "\\1.\\2" OUTPUT_VARIABLE text)
  list(JOIN text ", " text)
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# The options by which nvcc compiles for `archs`, a list as CMAKE_CUDA_ARCHITECTURES has it. With `shared`, machine code
# for 8.9 is made of the PTX for 8.0 where that is wanted too: one run of the compiler's front half, which takes longer
# than ptxas, in place of two, and the same machine code (DLATTN_CODE_OF_89, cuda/tile/stages.cuh). Not for code
# that asks for instructions of 8.9, and not beside machine code for 8.0, which hands stages over in a way of its own.
function(dlattn_code_flags variable shared archs)
  set(flags "")
  if(shared AND "80-virtual" IN_LIST archs AND "89-real" IN_LIST archs AND NOT "80-real" IN_LIST archs)
    list(REMOVE_ITEM archs 89-real 89-virtual)
    list(APPEND flags --generate-code=arch=compute_80,code=sm_89 -DDLATTN_CODE_OF_89)
  endif()
  foreach(arch ${archs})
    string(REGEX MATCH "^[0-9]+[af]?" name ${arch})
    if(NOT arch MATCHES "-virtual$")
      list(APPEND flags --generate-code=arch=compute_${name},code=sm_${name})
    endif()
    if(NOT arch MATCHES "-real$")
      list(APPEND flags --generate-code=arch=compute_${name},code=compute_${name})
    endif()
  endforeach()
  set(${variable} ${flags} PARENT_SCOPE)
endfunction()

# Sets `variable` to what CMAKE_CUDA_ARCHITECTURES should be, DLATTN_ARCHS_REASON to why, and says it. Sets
# DLATTN_ASKED_FAMILY_ARCHS to the architectures whose own families are wanted beside those, and DLATTN_SMALL to whether
# bytes count more than the time to compress them. `nvcc` is the compiler.
function(dlattn_choose_archs variable nvcc)
  if(NOT EXISTS "${nvcc}")  # CUDACXX may be a name, and have flags
    separate_arguments(words UNIX_COMMAND "${nvcc}")
    list(POP_FRONT words nvcc)
  endif()
  set(DLATTN_ASKED_FAMILY_ARCHS "" PARENT_SCOPE)
  set(DLATTN_SMALL ON PARENT_SCOPE)
  set(archs "${CMAKE_CUDA_ARCHITECTURES}")
  if(NOT archs AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(archs "$ENV{CUDAARCHS}")
  endif()
  foreach(arch ${archs})
    if(arch STREQUAL "native")
      continue()
    endif()
    if(NOT arch MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS DLATTN_MIN_ARCH)
      message(FATAL_ERROR
        "dlattn: CMAKE_CUDA_ARCHITECTURES has \"${arch}\"; the kernels need compute capability 8.0 or later. "
        "Accepted: a list of 80, 86, 89, 90, ... with -real (machine code) or -virtual (PTX) or neither (both), "
        "or native. Leave it unset for the default.")
    endif()
  endforeach()
  if(archs)
    list(JOIN archs ", " text)
    message(STATUS "dlattn: building for ${text} (CMAKE_CUDA_ARCHITECTURES)")
    set(${variable} ${archs} PARENT_SCOPE)
    set(DLATTN_ARCHS_REASON CMAKE_CUDA_ARCHITECTURES PARENT_SCOPE)
    return()
  endif()

  set(asked "${DLATTN_ARCHS}")
  if(asked STREQUAL "")
    set(asked "$ENV{DLATTN_ARCHS}")
  endif()
  string(STRIP "${asked}" asked)
  string(REGEX REPLACE "[ ,;]+" ";" items "${asked}")

  execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE codes)
  string(REGEX MATCHALL "sm_[0-9]+[^0-9a-z]" known "${codes}")
  list(TRANSFORM known REPLACE "[^0-9]" "")
  list(SORT known COMPARE NATURAL)

  list(JOIN items ", " reason)
  string(PREPEND reason "DLATTN_ARCHS: ")
  set(native "")
  if(asked STREQUAL "" OR "native" IN_LIST items)
    _dlattn_native_archs(found "${nvcc}")
    foreach(arch ${found})
      if(arch GREATER_EQUAL DLATTN_MIN_ARCH)
        list(APPEND native ${arch})
      endif()
    endforeach()
    _dlattn_capabilities(found ${found})
    if(asked STREQUAL "")
      set(items common)
      set(reason "no GPU found")
      if(native)
        set(items native)
        _dlattn_capabilities(reason ${native})
        string(PREPEND reason "GPU found: ")
      elseif(found)
        set(reason "no GPU of compute capability 8.0 or later found")
      endif()
    elseif(NOT native)
      if(NOT found)
        set(found none)
      endif()
      message(FATAL_ERROR
        "dlattn: DLATTN_ARCHS is \"${asked}\", and no GPU of compute capability 8.0 or later is found here (found: "
        "${found}; asked: nvidia-smi, __nvcc_device_query). Accepted: common, all, or a list of compute capabilities "
        "(89;90).")
    endif()
  endif()

  set(chosen "")
  set(unknown "")
  set(ptx ${DLATTN_OTHER_PTX})
  if(items STREQUAL "all")
    set(ptx ${DLATTN_ALL_PTX})
    foreach(arch ${DLATTN_ALL_ARCHS})
      if(arch IN_LIST known)
        list(APPEND chosen ${arch})
      else()
        list(APPEND unknown ${arch})
      endif()
    endforeach()
    set(rest "DLATTN_ARCHS=common, native, or a list as 89;90, builds for fewer in less time")
  elseif(items STREQUAL "common")
    set(chosen 89)
    set(ptx ${DLATTN_COMMON_ARCHS})
    list(REMOVE_ITEM ptx 89-real)
    set(DLATTN_ASKED_FAMILY_ARCHS ${DLATTN_COMMON_FAMILY_ARCHS} PARENT_SCOPE)
    set(rest "DLATTN_ARCHS=all builds machine code for every GPU, DLATTN_ARCHS=90 for a Hopper")
  else()
    foreach(item ${items})
      if(item STREQUAL "native")
        foreach(arch ${native})
          _dlattn_machine_code(code ${arch} "${known}")
          if(code)
            list(APPEND chosen ${code})
          else()
            list(APPEND unknown ${arch})
          endif()
        endforeach()
        continue()
      endif()
      string(REGEX REPLACE "^([0-9]+)\\.([0-9])$" "\\1\\2" arch "${item}")
      if(NOT arch MATCHES "^[0-9]+$" OR arch LESS DLATTN_MIN_ARCH OR NOT arch IN_LIST known)
        set(accepted "")
        foreach(each ${known})
          if(each GREATER_EQUAL DLATTN_MIN_ARCH)
            list(APPEND accepted ${each})
          endif()
        endforeach()
        list(JOIN accepted ", " accepted)
        message(FATAL_ERROR
          "dlattn: DLATTN_ARCHS is \"${asked}\" and has \"${item}\". Accepted: common; all; native, for the GPUs of this "
          "machine; or a list of compute capabilities that this nvcc knows (89;90): ${accepted}.")
      endif()
      list(APPEND chosen ${arch})
    endforeach()
    set(rest "DLATTN_ARCHS=all builds machine code for every GPU")
  endif()
  list(REMOVE_DUPLICATES chosen)
  list(SORT chosen COMPARE NATURAL)
  list(LENGTH chosen num_chosen)
  if(items STREQUAL "native" OR num_chosen LESS 2)  # installed where it is built, or in an image for one kind of GPU
    set(DLATTN_SMALL OFF PARENT_SCOPE)
  endif()
  if(chosen AND NOT items MATCHES "^(all|common)$")
    list(GET chosen 0 oldest)
    set(ptx ${oldest}-virtual)
  endif()

  set(text "PTX alone")
  if(chosen)
    _dlattn_capabilities(text ${chosen})
    string(PREPEND text "machine code for ")
    string(REGEX MATCH "^[0-9]+" from "${ptx}")
    _dlattn_capabilities(from ${from})
    string(APPEND text " and PTX for ${from} and later")
    if(items STREQUAL "common")
      string(APPEND text ", with the kernels for 9.0 alone")
    endif()
  endif()
  if(unknown)
    _dlattn_capabilities(unknown ${unknown})
    string(APPEND reason "; this nvcc does not know ${unknown}, where the PTX serves")
  endif()
  message(STATUS "dlattn: building ${text} (${reason}). ${rest}.")
  list(TRANSFORM chosen APPEND -real)
  set(${variable} ${chosen} ${ptx} PARENT_SCOPE)
  set(DLATTN_ARCHS_REASON "${reason}" PARENT_SCOPE)
endfunction()
