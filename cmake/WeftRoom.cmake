# weft_room(NAME [SOURCES ...] [USES ...]): one room of src/ as one library, static or header-only.
#
# Sources include "room/file.hpp". Each room is reached through its own directory (<build>/rooms/NAME/NAME -> src/NAME),
# and a room's include path holds only the rooms it USES: an include that points up or sideways does not compile.

add_library(weft_options INTERFACE)
target_compile_features(weft_options INTERFACE cxx_std_20)
# -ffp-contract=off: host results must not depend on which a * b + c the compiler chose to fuse.
set(weft_warnings -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
list(JOIN weft_warnings "," weft_host_warnings)  # nvcc hands them on
target_compile_options(weft_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${weft_warnings};-Wpedantic;-ffp-contract=off>"
                                              "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${weft_host_warnings}>")
if(WEFT_WARNINGS_AS_ERRORS)
  target_compile_options(weft_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                                                "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>")
endif()
if(WEFT_CPU_ARCH AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(weft_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=${WEFT_CPU_ARCH}>)
endif()
if(WEFT_SANITIZE)
  list(JOIN WEFT_SANITIZE "," weft_sanitizers)
  target_compile_options(weft_options INTERFACE -fsanitize=${weft_sanitizers} -fno-sanitize-recover=all
                                                -fno-omit-frame-pointer -g -O1)
  target_link_options(weft_options INTERFACE -fsanitize=${weft_sanitizers})
endif()

function(weft_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;USES" ${ARGN})
  set(room_dir ${PROJECT_BINARY_DIR}/rooms/${name})
  file(MAKE_DIRECTORY ${room_dir})
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${room_dir}/${name} SYMBOLIC)
  if(ROOM_SOURCES)
    add_library(weft_${name} STATIC ${ROOM_SOURCES})
    set(scope PUBLIC)
    target_link_libraries(weft_${name} PRIVATE weft_options)
  else()
    add_library(weft_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(weft_${name} ${scope} ${room_dir} ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(weft_${name} ${scope} Threads::Threads)
  foreach(room IN LISTS ROOM_USES)
    target_link_libraries(weft_${name} ${scope} weft_${room})
  endforeach()
endfunction()
