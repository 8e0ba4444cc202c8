// A tile of FP8 keys and values in shared memory, and its products by mma.sync: bytes become operands in registers.
// Products are of float16, whatever T is: it holds every e4m3 number, and a chip makes two of two bytes at once.
//
// A tile has D bytes a row, in chunks of 16, swizzled so that ldmatrix has no bank conflicts. To ldmatrix two bytes are
// one number, so a lane gets four bytes of a row, of which products 16 deep want columns 2t, 2t + 1, 2t + 8 and 2t + 9.
// Instead of moving bytes, the columns are renamed: of 16 columns lane t of four has 4t to 4t + 3, and
//   scores: numbers 2t, 2t + 1, 2t + 8, 2t + 9 of a product are columns 4t to 4t + 3, of the queries too;
//   sums: of each 16 columns two products of 8 take the even and the odd ones.
#pragma once

#include "fp8.cuh"

namespace trt_eagle3 {

template <int kD>
__device__ __forceinline__ uint32_t fp8_offset(int row, int chunk) {
  static_assert(kD % 64 == 0);
  if constexpr (kD == 64) {
    return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
  } else {
    return row * kD + (chunk >> 3) * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  }
}

// A fragment (16 rows x 16 columns) of the queries, as fp8_scores wants its columns. `row` and row + 8 are this lane's.
template <typename Tile>
__device__ __forceinline__ void fp8_load_query(uint32_t (&fragment)[4], uint32_t queries, int row0, int step,
                                               int lane) {
  const int chunk = step * 2 + (lane >> 1 & 1), within = (lane & 1) * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane / 4 + 8 * half;
    uint32_t first, second;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n"
                 : "=r"(first), "=r"(second)
                 : "r"(queries + tile_offset<Tile::D>(row, chunk, Tile::Rows) + within)
                 : "memory");
    constexpr bool kSame = std::is_same_v<typename Tile::T, typename Tile::Factor>;
    fragment[half] = kSame ? first : two_halves<typename Tile::T>(first);
    fragment[2 + half] = kSame ? second : two_halves<typename Tile::T>(second);
  }
}

// scores = queries . keys^T for this warp's 16 rows.
template <typename Tile>
__device__ __forceinline__ void fp8_scores(float (&scores)[Tile::Tokens / 8][4],
                                           const uint32_t (&query)[Tile::D / 16][4], uint32_t keys, int lane) {
  using T = typename Tile::Factor;
#pragma unroll
  for (int j = 0; j < Tile::Tokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < Tile::D / 16; step += 2) {
#pragma unroll
    for (int pair = 0; pair < Tile::Tokens / 16; ++pair) {
      const int row = pair * 16 + (lane & 7) + (lane >> 4 << 3);
      uint32_t four[4];  // tokens 0 to 7 at this step and the next, tokens 8 to 15
      load_matrix4(four, keys + fp8_offset<Tile::D>(row, step + (lane >> 3 & 1)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = fp8_pair_of<T>(four[i], 0), high = fp8_pair_of<T>(four[i], 1);
        mma<T>(scores[2 * pair + i / 2], query[step + i % 2], low, high);
      }
    }
  }
}

// out += weights . values; `a` are the weights of each 16 tokens.
template <typename Tile>
__device__ __forceinline__ void fp8_sums(float (&out)[Tile::D / 8][4], const uint32_t (&a)[Tile::Tokens / 16][4],
                                         uint32_t values, int lane) {
  using T = typename Tile::Factor;
#pragma unroll
  for (int step = 0; step < Tile::Tokens / 16; ++step) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::D / 16; chunk += 2) {
      uint32_t four[4];  // tokens 0 to 7 and 8 to 15 of this chunk, and of the next
      load_matrix4_transposed(four, values + fp8_offset<Tile::D>(step * 16 + (lane & 15), chunk + (lane >> 4)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // a column of two tokens beside the next one, instead of a token's two columns
        const uint32_t low = __byte_perm(four[2 * i], 0, 0x3120), high = __byte_perm(four[2 * i + 1], 0, 0x3120);
        mma<T>(out[2 * (chunk + i)], a[step], fp8_pair_of<T>(low, 0), fp8_pair_of<T>(high, 0));
        mma<T>(out[2 * (chunk + i) + 1], a[step], fp8_pair_of<T>(low, 1), fp8_pair_of<T>(high, 1));
      }
    }
  }
}

// Stores row `half` of this lane's two of what fp8_sums left; `row` is where its columns lie.
template <typename Tile>
__device__ __forceinline__ void fp8_store_sums(float* row, const float (&out)[Tile::D / 8][4], int half, int lane) {
#pragma unroll
  for (int chunk = 0; chunk < Tile::D / 16; ++chunk) {
    const float (&even)[4] = out[2 * chunk];
    const float (&odd)[4] = out[2 * chunk + 1];
    *reinterpret_cast<float4*>(row + chunk * 16 + (lane & 3) * 4) =
        make_float4(even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]);
  }
}

}  // namespace trt_eagle3
