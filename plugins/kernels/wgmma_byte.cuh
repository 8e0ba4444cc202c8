// Hopper's warpgroup products of bytes: 64 rows by 64 or 128 columns, 32 deep, A and B in shared memory with the inner
// dimension contiguous. e4m3 by e4m3 into float32 (which the chip adds in about 14 bits), u8 by s8 into int32 exactly.
// d[j][e] of a thread: as in wgmma.cuh.
#pragma once

#include <cuda_fp8.h>

#include "wgmma.cuh"

namespace trt_eagle3 {

// What a byte of A is.
struct E4m3 {
  using Sum = float;
};
struct Code8 {  // unsigned; B's are signed
  using Sum = int32_t;
};

#if TRT_EAGLE3_HAS_WGMMA

#define TRT_EAGLE3_D8 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, "
#define TRT_EAGLE3_D16                                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "    \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, "
#define TRT_EAGLE3_OUT4(c, j) c(d[j][0]), c(d[j][1]), c(d[j][2]), c(d[j][3])
#define TRT_EAGLE3_OUT16(c, j) \
  TRT_EAGLE3_OUT4(c, j), TRT_EAGLE3_OUT4(c, j + 1), TRT_EAGLE3_OUT4(c, j + 2), TRT_EAGLE3_OUT4(c, j + 3)
#define TRT_EAGLE3_OUT32(c, j) TRT_EAGLE3_OUT16(c, j), TRT_EAGLE3_OUT16(c, j + 4)

__device__ __forceinline__ void wgmma_bytes(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " TRT_EAGLE3_D8 "1, 1, 1;\n"
               : TRT_EAGLE3_OUT32("+f", 0)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_bytes(float (&d)[16][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " TRT_EAGLE3_D16 "1, 1, 1;\n"
               : TRT_EAGLE3_OUT32("+f", 0), TRT_EAGLE3_OUT32("+f", 8)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_bytes(int32_t (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 " TRT_EAGLE3_D8 "1;\n"
               : TRT_EAGLE3_OUT32("+r", 0)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_bytes(int32_t (&d)[16][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 " TRT_EAGLE3_D16 "1;\n"
               : TRT_EAGLE3_OUT32("+r", 0), TRT_EAGLE3_OUT32("+r", 8)
               : "l"(a), "l"(b));
}

#undef TRT_EAGLE3_D8
#undef TRT_EAGLE3_D16
#undef TRT_EAGLE3_OUT4
#undef TRT_EAGLE3_OUT16
#undef TRT_EAGLE3_OUT32

#endif  // TRT_EAGLE3_HAS_WGMMA

}  // namespace trt_eagle3
