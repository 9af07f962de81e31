# Options of the build, ON or OFF. CMake itself takes any other word for ON.
include_guard()

set(DLATTN_ON_OR_OFF "^(1|ON|YES|TRUE|Y|0|OFF|NO|FALSE|N|IGNORE|NOTFOUND|.*-NOTFOUND|)$")

function(_dlattn_check_option value place)
  string(TOUPPER "${value}" upper)
  if(NOT upper MATCHES "${DLATTN_ON_OR_OFF}")
    message(FATAL_ERROR "dlattn: ${place} is \"${value}\"; accepted: ON or OFF.")
  endif()
endfunction()

macro(dlattn_option name text default)
  option(${name} "${text}" ${default})
  _dlattn_check_option("${${name}}" ${name})
endmacro()

# An option that the environment may set too: `DLATTN_CUDA=OFF cmake ...`. A CMake variable goes before it, and so does
# what a build folder was first configured with.
macro(dlattn_option_or_environment name text default)
  set(_dlattn_default ${default})
  string(STRIP "$ENV{${name}}" _dlattn_asked)
  if(NOT _dlattn_asked STREQUAL "")
    _dlattn_check_option("${_dlattn_asked}" "${name} of the environment")
    if(NOT DEFINED ${name})
      message(STATUS "dlattn: ${name}=${_dlattn_asked} (environment)")
    elseif(NOT "${_dlattn_asked}" STREQUAL "${${name}}")
      message(STATUS "dlattn: ${name}=${${name}} goes before the environment's ${_dlattn_asked}")
    endif()
    set(_dlattn_default ${_dlattn_asked})
  endif()
  dlattn_option(${name} "${text}" ${_dlattn_default})
endmacro()
