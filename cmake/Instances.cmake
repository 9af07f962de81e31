# Turns src/cuda/instances.cmake into files in the build folder:
#   instances.inc     DLATTN_INSTANCE(kScalar, kFloat16, 64) ... for the registry's tables
#   <instance>.cu     one explicit instantiation of a family's launcher each; listed in DLATTN_INSTANCE_SOURCES
set(DLATTN_GENERATED_DIR ${PROJECT_BINARY_DIR}/generated)
set(DLATTN_INSTANCE_SOURCES)
set(_instances_inc "// Generated from src/cuda/instances.cmake.\n")

set(_enum_scalar kScalar)
set(_enum_wmma_qk kWmmaQk)
set(_enum_wmma_smem kWmmaSmem)
set(_enum_wmma kWmma)
set(_enum_float16 kFloat16)
set(_enum_bfloat16 kBFloat16)
set(_enum_float32 kFloat32)

function(dlattn_instance family dtype)
  foreach(tile ${ARGN})
    string(APPEND _instances_inc "DLATTN_INSTANCE(${_enum_${family}}, ${_enum_${dtype}}, ${tile})\n")
    set(DLATTN_FAMILY ${family})
    set(DLATTN_DTYPE ${_enum_${dtype}})
    set(DLATTN_TILE ${tile})
    set(source ${DLATTN_GENERATED_DIR}/${family}_${dtype}_${tile}.cu)
    configure_file(${PROJECT_SOURCE_DIR}/src/cuda/instance.cu.in ${source} @ONLY)
    list(APPEND DLATTN_INSTANCE_SOURCES ${source})
  endforeach()
  set(_instances_inc "${_instances_inc}" PARENT_SCOPE)
  set(DLATTN_INSTANCE_SOURCES ${DLATTN_INSTANCE_SOURCES} PARENT_SCOPE)
endfunction()

include(${PROJECT_SOURCE_DIR}/src/cuda/instances.cmake)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/instances.cmake)
file(CONFIGURE OUTPUT ${DLATTN_GENERATED_DIR}/instances.inc CONTENT "${_instances_inc}" @ONLY)
