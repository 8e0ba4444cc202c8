// Products of a quantised weight that becomes numbers in registers, with rows of x in stages of shared memory: the inner
// loop of linear_packed_wide.cuh and moe_wide_packed.cuh.
#pragma once

#include "barrier.cuh"
#include "packed_weight.cuh"
#include "wgmma.cuh"

namespace trt_eagle3 {

#if TRT_EAGLE3_HAS_WGMMA

#define TRT_EAGLE3_OUT4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define TRT_EAGLE3_OUT16(j) \
  TRT_EAGLE3_OUT4(j), TRT_EAGLE3_OUT4(j + 1), TRT_EAGLE3_OUT4(j + 2), TRT_EAGLE3_OUT4(j + 3)
#define TRT_EAGLE3_IN(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define TRT_EAGLE3_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TRT_EAGLE3_NAMES32 \
  TRT_EAGLE3_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TRT_EAGLE3_NAMES48 \
  TRT_EAGLE3_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

// d += A . B, A in registers, B in shared memory with the inner dimension contiguous: of 32, 64, 96 or 128 columns.
template <typename T>
__device__ __forceinline__ void wgmma_rs_inner(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
#define TRT_EAGLE3_WGMMA(type)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" TRT_EAGLE3_NAMES16 \
               "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;\n"                                       \
               : TRT_EAGLE3_OUT16(0)                                                               \
               : TRT_EAGLE3_IN(a, b))
  if constexpr (std::is_same_v<T, __half>) {
    TRT_EAGLE3_WGMMA("f16");
  } else {
    TRT_EAGLE3_WGMMA("bf16");
  }
#undef TRT_EAGLE3_WGMMA
}
template <typename T>
__device__ __forceinline__ void wgmma_rs_inner(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
#define TRT_EAGLE3_WGMMA(type)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" TRT_EAGLE3_NAMES32 \
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n"                                       \
               : TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4)                                          \
               : TRT_EAGLE3_IN(a, b))
  if constexpr (std::is_same_v<T, __half>) {
    TRT_EAGLE3_WGMMA("f16");
  } else {
    TRT_EAGLE3_WGMMA("bf16");
  }
#undef TRT_EAGLE3_WGMMA
}
template <typename T>
__device__ __forceinline__ void wgmma_rs_inner(float (&d)[12][4], const uint32_t (&a)[4], uint64_t b) {
#define TRT_EAGLE3_WGMMA(type)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type " {" TRT_EAGLE3_NAMES48 \
               "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 0;\n"                                       \
               : TRT_EAGLE3_OUT16(0), TRT_EAGLE3_OUT16(4), TRT_EAGLE3_OUT16(8)                     \
               : TRT_EAGLE3_IN(a, b))
  if constexpr (std::is_same_v<T, __half>) {
    TRT_EAGLE3_WGMMA("f16");
  } else {
    TRT_EAGLE3_WGMMA("bf16");
  }
#undef TRT_EAGLE3_WGMMA
}
template <typename T>
__device__ __forceinline__ void wgmma_rs_inner(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  wgmma_rs_rows<T>(d, a, b, 1);
}
#undef TRT_EAGLE3_NAMES48
#undef TRT_EAGLE3_NAMES32
#undef TRT_EAGLE3_NAMES16
#undef TRT_EAGLE3_IN
#undef TRT_EAGLE3_OUT16
#undef TRT_EAGLE3_OUT4

template <int kTiles>
__device__ __forceinline__ void rescale(float (&sums)[kTiles][4], float low, float high) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] *= e < 2 ? low : high;
  }
}

// A scale that may be divided by: of numbers whose scale is 0 nothing is left all the same.
__device__ __forceinline__ float divisible(float scale) { return scale == 0.0f ? 1e-20f : scale; }

// sums += W . x^T of stage i of `ring`, two panels of 64 columns of x. The sums are those of numbers divided by `scales`,
// of rows g and g + 8: where scales change along K, they are rescaled by old / new. The products end under the next call,
// which releases the stage; or, with kDrains, here: loops that multiply different numbers of columns in one kernel want
// that, as ptxas gives each its own registers where products of one may run on into the other (C7512).
template <typename Format, int kPanelBytes, bool kDrains, int kTiles, typename Ring>
__device__ __forceinline__ void multiply_packed_stage(const PackedWeight& w, const Ring& ring, int i,
                                                      const PackedSpan<Format>& span, float (&scales)[2],
                                                      float (&sums)[kTiles][4]) {
  constexpr int kPieces = Format::Groups > 2 ? Format::Groups : 2;  // of a stage, made and multiplied in turn
  constexpr int kBlocks = kPackedBlocks / kPieces;
  const bool rescales = !Format::constant(w);
  const uint64_t stage = wgmma_descriptor(ring.stage(i), 16);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int group = piece * Format::Groups / kPieces;
    uint32_t a[kBlocks][4];
    wgmma_wait<1>();  // the piece before last, whose registers these are
    if (!kDrains && piece == 1 && i > 0) ring.release(i - 1);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) Format::operand(span, piece * kBlocks + b, a[b]);
    if (piece == 0) ring.await(i);
    if (rescales && piece % (kPieces / Format::Groups) == 0) {
      const float low = divisible(Format::scale(w, span.low_scale, group));
      const float high = divisible(Format::scale(w, span.high_scale, group));
      wgmma_wait<0>();
      wgmma_pin(sums);
      rescale(sums, __fdividef(scales[0], low), __fdividef(scales[1], high));
      scales[0] = low;
      scales[1] = high;
    }
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int block = piece * kBlocks + b;
      const uint64_t x = stage + (block / 4 * kPanelBytes + block % 4 * 32) / 16;
      wgmma_rs_inner<typename Format::T>(sums, a[b], x);
    }
    wgmma_commit();
  }
  if constexpr (kDrains) {
    wgmma_wait<0>();
    wgmma_pin(sums);
    ring.release(i);
  }
}

#endif  // TRT_EAGLE3_HAS_WGMMA

}  // namespace trt_eagle3
