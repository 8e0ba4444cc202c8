// Products of a quantised weight that becomes numbers in registers, with rows of x in stages of shared memory: the inner
// loop of linear_packed_wide.cuh and moe_wide_packed.cuh.
#pragma once

#include "barrier.cuh"
#include "packed_weight.cuh"
#include "wgmma_columns.cuh"

namespace trt_eagle3 {

#if TRT_EAGLE3_HAS_WGMMA

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
