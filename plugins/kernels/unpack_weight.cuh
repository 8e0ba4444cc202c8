// A quantised weight as numbers of T, in the order of columns that stock products take: for prompts, where a weight is
// used by so many tokens that writing it out is little beside the product.
//
// Idea: a warp loads a span as for a product, and leaves it in shared memory, from where whole rows of 256 bytes go
// out. Bytes moved: N * K * (bits / 8 + sizeof(T)). Measured: docs/measurements.md, "Quantised weights".
#pragma once

#include "packed_weight.cuh"

namespace trt_eagle3 {

constexpr int kUnpackWarps = 8;
constexpr int kUnpackPitch = kPackedSpan * 2 + 16;  // bytes between rows in shared memory: no bank conflicts

template <typename T>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  float2 values;
  if constexpr (std::is_same_v<T, __half>) {
    values = __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    values = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
  return pack2<T>(values.x * scale, values.y * scale);
}

// grid (spans of columns / kUnpackWarps, tiles of 16 rows); each value is rounded once, from code times scale.
template <typename Format>
__global__ void __launch_bounds__(32 * kUnpackWarps) unpack_weight_kernel(const PackedWeight w, void* out) {
  using T = typename Format::T;
  __shared__ __align__(16) char tiles[kUnpackWarps][kPackedRows * kUnpackPitch];
  static_assert(kPackedSlotBytes<Format> <= kPackedRows * kUnpackPitch);
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y * kPackedRows;
  const int column = (blockIdx.x * kUnpackWarps + warp) * kPackedSpan;
  if (column >= w.inner) return;
  PackedPlace<Format> place;
  place.set(w, row + lane / 4, column);
  char* tile = tiles[warp];
  place.copy(w, shared_address(tile));
  copy_async_commit();
  copy_async_wait<0>();
  __syncwarp();
  PackedSpan<Format> span;
  read_span<Format>(w, tile, scale_index<Format>(w, column), span);
  __syncwarp();  // every lane has read its span
#pragma unroll
  for (int block = 0; block < kPackedBlocks; ++block) {
    uint32_t a[4];
    Format::operand(span, block, a);
    const int group = block / (kPackedBlocks / Format::Groups);
    const float scales[2] = {Format::scale(w, span.low_scale, group), Format::scale(w, span.high_scale, group)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (lane / 4 + i % 2 * 8) * kUnpackPitch + block * 32 + i / 2 * 16 + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(tile + at) = scaled_pair<T>(a[i], scales[i % 2]);
    }
  }
  __syncwarp();
  T* target = static_cast<T*>(out) + static_cast<int64_t>(row) * w.inner + column;
#pragma unroll
  for (int i = 0; i < kPackedRows / 2; ++i) {
    const int at = i * 2 + lane / 16, chunk = lane % 16;
    *reinterpret_cast<uint4*>(target + static_cast<int64_t>(at) * w.inner + chunk * 8) =
        *reinterpret_cast<const uint4*>(tile + at * kUnpackPitch + chunk * 16);
  }
}

template <typename Format>
cudaError_t launch_unpack_weight(const PackedWeight& w, void* out, cudaStream_t stream) {
  const dim3 grid(ceil_div(w.inner / kPackedSpan, kUnpackWarps), w.outer / kPackedRows);
  return launch(Overlap::kYes, unpack_weight_kernel<Format>, grid, 32 * kUnpackWarps, 0, 1, stream, w, out);
}

}  // namespace trt_eagle3
