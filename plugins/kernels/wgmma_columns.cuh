// Warpgroup products d += A . B of 64 rows of A by 32 to 256 rows of B, with the inner dimension of both contiguous, and B in
// shared memory.
//
// wgmma_ss_inner: A in shared memory. wgmma_rs_inner: A in registers.
#pragma once

#include "wgmma.cuh"

namespace trt_eagle3 {

#if TRT_EAGLE3_HAS_WGMMA

#define TRT_EAGLE3_OUT4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define TRT_EAGLE3_OUT16(j) TRT_EAGLE3_OUT4(j), TRT_EAGLE3_OUT4(j + 1), TRT_EAGLE3_OUT4(j + 2), TRT_EAGLE3_OUT4(j + 3)
#define TRT_EAGLE3_NAMES0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TRT_EAGLE3_NAMES1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TRT_EAGLE3_NAMES2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TRT_EAGLE3_NAMES3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TRT_EAGLE3_NAMES4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TRT_EAGLE3_NAMES5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TRT_EAGLE3_NAMES6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TRT_EAGLE3_NAMES7 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `names` are those of d, `operands` those of A and B.
#define TRT_EAGLE3_WGMMA_SS(columns, names, operands, ...)                                                 \
  template <typename T>                                                                                    \
  __device__ __forceinline__ void wgmma_ss_inner(float (&d)[columns / 8][4], uint64_t a, uint64_t b) {     \
    if constexpr (std::is_same_v<T, __half>) {                                                             \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" names "}, " operands   \
                   ", 1, 1, 1, 0, 0;\n"                                                                    \
                   : __VA_ARGS__                                                                           \
                   : "l"(a), "l"(b));                                                                      \
    } else {                                                                                               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, " operands \
                   ", 1, 1, 1, 0, 0;\n"                                                                    \
                   : __VA_ARGS__                                                                           \
                   : "l"(a), "l"(b));                                                                      \
    }                                                                                                      \
  }
#define TRT_EAGLE3_WGMMA_RS(columns, names, operands, ...)                                                         \
  template <typename T>                                                                                            \
  __device__ __forceinline__ void wgmma_rs_inner(float (&d)[columns / 8][4], const uint32_t (&a)[4], uint64_t b) { \
    if constexpr (std::is_same_v<T, __half>) {                                                                     \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" names "}, " operands           \
                   ", 1, 1, 1, 0;\n"                                                                               \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    } else {                                                                                                       \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, " operands         \
                   ", 1, 1, 1, 0;\n"                                                                               \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    }                                                                                                              \
  }
TRT_EAGLE3_WGMMA_SS(32, TRT_EAGLE3_NAMES0, "%16, %17", TRT_EAGLE3_OUT16(0))
TRT_EAGLE3_WGMMA_SS(64, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1, "%32, %33", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4))
TRT_EAGLE3_WGMMA_SS(96, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2, "%48, %49", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8))
TRT_EAGLE3_WGMMA_SS(128, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2 TRT_EAGLE3_NAMES3, "%64, %65", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8), TRT_EAGLE3_OUT16(12))
TRT_EAGLE3_WGMMA_SS(160, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2 TRT_EAGLE3_NAMES3 TRT_EAGLE3_NAMES4, "%80, %81", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8), TRT_EAGLE3_OUT16(12), TRT_EAGLE3_OUT16(16))
TRT_EAGLE3_WGMMA_SS(192, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2 TRT_EAGLE3_NAMES3 TRT_EAGLE3_NAMES4 TRT_EAGLE3_NAMES5, "%96, %97", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8), TRT_EAGLE3_OUT16(12), TRT_EAGLE3_OUT16(16), TRT_EAGLE3_OUT16(20))
TRT_EAGLE3_WGMMA_SS(224, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2 TRT_EAGLE3_NAMES3 TRT_EAGLE3_NAMES4 TRT_EAGLE3_NAMES5 TRT_EAGLE3_NAMES6, "%112, %113", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8), TRT_EAGLE3_OUT16(12), TRT_EAGLE3_OUT16(16), TRT_EAGLE3_OUT16(20), TRT_EAGLE3_OUT16(24))
TRT_EAGLE3_WGMMA_SS(256, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2 TRT_EAGLE3_NAMES3 TRT_EAGLE3_NAMES4 TRT_EAGLE3_NAMES5 TRT_EAGLE3_NAMES6 TRT_EAGLE3_NAMES7, "%128, %129", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8), TRT_EAGLE3_OUT16(12), TRT_EAGLE3_OUT16(16), TRT_EAGLE3_OUT16(20), TRT_EAGLE3_OUT16(24), TRT_EAGLE3_OUT16(28))
TRT_EAGLE3_WGMMA_RS(32, TRT_EAGLE3_NAMES0, "{%16, %17, %18, %19}, %20", TRT_EAGLE3_OUT16(0))
TRT_EAGLE3_WGMMA_RS(64, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1, "{%32, %33, %34, %35}, %36", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4))
TRT_EAGLE3_WGMMA_RS(96, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2, "{%48, %49, %50, %51}, %52", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8))
TRT_EAGLE3_WGMMA_RS(128, TRT_EAGLE3_NAMES0 TRT_EAGLE3_NAMES1 TRT_EAGLE3_NAMES2 TRT_EAGLE3_NAMES3, "{%64, %65, %66, %67}, %68", TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8), TRT_EAGLE3_OUT16(12))
#undef TRT_EAGLE3_WGMMA_RS
#undef TRT_EAGLE3_WGMMA_SS
#undef TRT_EAGLE3_NAMES0
#undef TRT_EAGLE3_NAMES1
#undef TRT_EAGLE3_NAMES2
#undef TRT_EAGLE3_NAMES3
#undef TRT_EAGLE3_NAMES4
#undef TRT_EAGLE3_NAMES5
#undef TRT_EAGLE3_NAMES6
#undef TRT_EAGLE3_NAMES7
#undef TRT_EAGLE3_OUT16
#undef TRT_EAGLE3_OUT4

#endif  // TRT_EAGLE3_HAS_WGMMA

}  // namespace trt_eagle3
