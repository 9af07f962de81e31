# Turns src/cuda/instances.cmake into files in the build folder:
#   instances.inc     DLATTN_INSTANCE(kScalar, kFloat16, 64) ... for the registry's tables
#   <instance>.cu     explicit instantiations of a family's launcher, from instance.cu.in; listed in
#                     DLATTN_INSTANCE_SOURCES, those of sm90 in DLATTN_SM90_SOURCES
set(DLATTN_GENERATED_DIR ${PROJECT_BINARY_DIR}/generated)
set(DLATTN_INSTANCE_SOURCES)
set(DLATTN_SM90_SOURCES)
set(_instances_inc "// Generated from src/cuda/instances.cmake.\n")

set(_enum_scalar kScalar)
set(_enum_wmma_qk kWmmaQk)
set(_enum_wmma_smem kWmmaSmem)
set(_enum_wmma kWmma)
set(_enum_sm90 kSm90)
set(_enum_float16 kFloat16)
set(_enum_bfloat16 kBFloat16)
set(_enum_float32 kFloat32)

# The kernels of these take so long to compile that each tile has a file of its own. Of the others, which spend their
# time on headers, one file has all tiles of a dtype.
set(_file_per_tile wmma sm90)
file(READ ${PROJECT_SOURCE_DIR}/src/cuda/instance.cu.in _template)

function(dlattn_instance family dtype)
  set(DLATTN_FAMILY ${family})
  set(DLATTN_DTYPE ${_enum_${dtype}})
  set(names)
  foreach(DLATTN_TILE ${ARGN})
    string(APPEND _instances_inc "DLATTN_INSTANCE(${_enum_${family}}, ${_enum_${dtype}}, ${DLATTN_TILE})\n")
    set(name ${family}_${dtype})
    if(family IN_LIST _file_per_tile)
      string(APPEND name _${DLATTN_TILE})
    endif()
    list(APPEND names ${name})
    string(CONFIGURE "${_template}" instantiation @ONLY)
    string(APPEND text_${name} "${instantiation}")
  endforeach()
  list(REMOVE_DUPLICATES names)
  foreach(name ${names})
    set(source ${DLATTN_GENERATED_DIR}/${name}.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT "${text_${name}}" @ONLY)
    if(family STREQUAL "sm90")
      list(APPEND DLATTN_SM90_SOURCES ${source})
    else()
      list(APPEND DLATTN_INSTANCE_SOURCES ${source})
    endif()
  endforeach()
  set(_instances_inc "${_instances_inc}" PARENT_SCOPE)
  set(DLATTN_INSTANCE_SOURCES ${DLATTN_INSTANCE_SOURCES} PARENT_SCOPE)
  set(DLATTN_SM90_SOURCES ${DLATTN_SM90_SOURCES} PARENT_SCOPE)
endfunction()

include(${PROJECT_SOURCE_DIR}/src/cuda/instances.cmake)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/src/cuda/instances.cmake ${PROJECT_SOURCE_DIR}/src/cuda/instance.cu.in)
file(CONFIGURE OUTPUT ${DLATTN_GENERATED_DIR}/instances.inc CONTENT "${_instances_inc}" @ONLY)
