# Included by llama.cpp's own project() (CMAKE_PROJECT_llama.cpp_INCLUDE): llama-cpp-python forces its helper library
# `common` on, which only llama.cpp's programs use.
set(LLAMA_BUILD_COMMON OFF)
