// Marks what both sides compile: plain C++ for g++, and __host__ __device__ when nvcc reads the same header.
#pragma once

#if defined(__CUDACC__)
#define WEFT_HD __host__ __device__
#else
#define WEFT_HD
#endif
