# Installs the library, its headers and the CMake package that find_package(dlattn CONFIG) reads.
include(CMakePackageConfigHelpers)
set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dlattn)

install(TARGETS dlattn EXPORT dlattnTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/include/dlattn
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT dlattnTargets NAMESPACE dlattn:: DESTINATION ${_package_dir})

# A shared libdlattn carries all it needs; who links a static one links its dependencies too.
set(DLATTN_NEEDS_THREADS OFF)
set(DLATTN_NEEDS_CXX OFF)
set(DLATTN_NEEDS_CUDA OFF)
if(NOT BUILD_SHARED_LIBS)
  set(DLATTN_NEEDS_THREADS ON)
  set(DLATTN_NEEDS_CXX ON)
  if(DLATTN_CUDA)
    set(DLATTN_NEEDS_CUDA ON)
  endif()
endif()
# C++'s own libraries, which no compiler of another language links by itself.
set(DLATTN_CXX_LIBS ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER DLATTN_CXX_LIBS INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|m)$")
list(REMOVE_DUPLICATES DLATTN_CXX_LIBS)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dlattnConfig.cmake.in
  ${PROJECT_BINARY_DIR}/dlattnConfig.cmake INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dlattnConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)  # before 1.0, a minor version may change the API
install(FILES ${PROJECT_BINARY_DIR}/dlattnConfig.cmake ${PROJECT_BINARY_DIR}/dlattnConfigVersion.cmake
  DESTINATION ${_package_dir})

# For builds without CMake. The prefix is found from where the file lies, so that it can be moved:
# with folders that are not below the prefix there is no such file.
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" AND NOT IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  file(RELATIVE_PATH _to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" DLATTN_PC_PREFIX "\${pcfiledir}/${_to_prefix}")
  set(DLATTN_PC_LIBS_PRIVATE "")
  if(NOT BUILD_SHARED_LIBS)
    list(TRANSFORM DLATTN_CXX_LIBS PREPEND "-l" OUTPUT_VARIABLE _cxx_libs)
    list(JOIN _cxx_libs " " _cxx_libs)
    set(DLATTN_PC_LIBS_PRIVATE "${_cxx_libs} -pthread -ldl")
    if(DLATTN_CUDA)
      string(PREPEND DLATTN_PC_LIBS_PRIVATE "-lcudart_static -lrt ")
    endif()
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/dlattn.pc.in ${PROJECT_BINARY_DIR}/dlattn.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/dlattn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
