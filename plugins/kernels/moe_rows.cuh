// Rows of x that lie in shared memory as long as a block does: of few rows, each goes through many tiles of weights.
#pragma once

#include "moe_task.cuh"
#include "x_in_half.cuh"

namespace trt_eagle3 {

__device__ __forceinline__ void load_shared4(uint32_t (&values)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}

// As T, columns past the last as zeros; or, where the weight is multiplied in half, as half with notes (x_in_half.cuh)
// for each row and span, or group. Without Block::Resident there are none.
template <typename Block>
struct MoeRows {
  using Format = typename Block::Weight;
  char* rows;
  int pitch, spans, inner;
  float* sums;     // [rows][spans * Groups]
  float* factors;  // [rows][spans]

  static __host__ __device__ int pitch_of(int inner) {
    return ceil_div(inner, kPackedSpan) * kPackedSpan * 2 + (Block::Packed ? 16 : 64);
  }
  static __host__ __device__ int bytes(int num_rows, int inner) {
    if (!Block::Resident) return 0;
    const int spans = ceil_div(inner, kPackedSpan);
    const int notes = spans * ((Format::Based ? Format::Groups * 4 : 0) + (Format::InHalf ? 4 : 0));
    return (num_rows * (pitch_of(inner) + notes) + 15) & ~15;
  }
  static __device__ __forceinline__ MoeRows at(char* shared, int num_rows, int inner) {
    MoeRows r;
    r.rows = shared;
    r.pitch = pitch_of(inner);
    r.spans = ceil_div(inner, kPackedSpan);
    r.inner = inner;
    r.sums = reinterpret_cast<float*>(shared + num_rows * r.pitch);
    r.factors = r.sums + (Format::Based ? num_rows * r.spans * Format::Groups : 0);
    return r;
  }
  __device__ __forceinline__ uint32_t at(int row) const { return shared_address(rows) + row * pitch; }
  __device__ __forceinline__ const float* sums_of(int row) const { return sums + row * spans * Format::Groups; }
  __device__ __forceinline__ const float* factors_of(int row) const { return factors + row * spans; }

  // The block brings rows of `source`, T [num_rows, inner]. Sixteen lanes have the 128 columns of a span.
  __device__ __forceinline__ void bring(const void* source, int num_rows) const {
    const int total = num_rows * spans * kChunksOfSpan;
    int first = 0;
#pragma unroll 1
    for (; first + Block::Threads < total; first += 4 * Block::Threads) bring_chunks<4>(source, num_rows, first);
    if (first < total) bring_chunks<1>(source, num_rows, first);
  }

  // kCount chunks of 8 columns a lane, from chunk `first` of all rows' on.
  template <int kCount>
  __device__ __forceinline__ void bring_chunks(const void* source, int num_rows, int first) const {
    const int chunks = spans * kChunksOfSpan, total = num_rows * chunks;
    uint4 values[kCount];
    int own[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = first + threadIdx.x + i * Block::Threads, row = at / chunks, chunk = at - row * chunks;
      own[i] = chunk;
      values[i] = {};
      if (at < total && chunk * 8 < inner) {
        values[i] = *reinterpret_cast<const uint4*>(static_cast<const char*>(source) +
                                                    (int64_t{row} * inner + chunk * 8) * 2);
      }
    }
    float row_factors[kCount], row_sums[kCount];
    if constexpr (Format::InHalf) halve_chunks<Format>(values, own, row_factors, row_sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = first + threadIdx.x + i * Block::Threads, row = at / chunks, chunk = own[i];
      if (at >= total) break;
      char* place = rows + row * pitch + chunk * 16;
      if constexpr (Format::InHalf) {
        const XNotes notes = {factors + row * spans, sums + row * spans * Format::Groups};
        keep_halves<Format, 1>(values[i], row_factors[i], row_sums[i], place, notes, chunk);
      } else {
        *reinterpret_cast<uint4*>(place) = values[i];
      }
    }
  }
};

}  // namespace trt_eagle3
