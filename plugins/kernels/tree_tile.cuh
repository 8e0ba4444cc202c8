// The pieces of TreeAttention that know how a tile lies in shared memory: addresses, loads, and the two products.
//
// A tile of R rows and D columns is cut into panels of 64 columns; each row of a panel is 128 bytes whose eight 16-byte
// chunks are swizzled by the row. ldmatrix reads it without bank conflicts, and it is what wgmma calls the 128-byte
// swizzle, so one copy serves both. D = 96 has no such panels: 192-byte rows with their own swizzle, for mma.sync
// alone.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "wgmma.cuh"

namespace trt_eagle3 {

enum class Math { kMma, kWgmma };

template <typename Tile>
struct SameTypeKV;  // kv_loader.cuh
template <typename Tile>
struct Fp8KV;  // kv_loader_fp8.cuh

// One configuration of the kernel. A block has kGroups groups of kWarps warps; each group takes every kGroups-th tile
// of kTileTokens cache slots through its own ring of kTileStages stages, for all 16 * kWarps query rows of the block.
// Of an FP8 cache the ring holds bytes. For wgmma a tile of them is widened in shared memory, once for all rows of the
// group; for mma.sync in registers.
template <typename Element, int kHeadDim, int kWarps, int kGroups, int kTileTokens, int kTileStages, Math kTileMath,
          bool kFp8 = false>
struct TreeTile {
  using T = Element;
  using KVLoader = std::conditional_t<kFp8, Fp8KV<TreeTile>, SameTypeKV<TreeTile>>;
  static constexpr bool Fp8 = kFp8;
  using Factor = std::conditional_t<kFp8, __half, Element>;  // what products multiply
  static constexpr int D = kHeadDim;
  static constexpr int Groups = kGroups;
  static constexpr int Rows = 16 * kWarps;
  static constexpr int Tokens = kTileTokens;
  static constexpr int Stages = kTileStages;
  static constexpr int GroupThreads = 32 * kWarps;
  static constexpr int Threads = GroupThreads * kGroups;
  static constexpr bool Wgmma = kTileMath == Math::kWgmma;
  static constexpr int Chunks = D / 8;
  static constexpr bool Widens = Fp8 && Wgmma;
  static constexpr int StageBytes = 2 * Tokens * D * (Fp8 ? 1 : 2);
  static constexpr int WideOffset = kGroups * Stages * StageBytes;  // of each group, a widened tile
  static constexpr int WideBytes = Widens ? 4 * Tokens * D : 0;
  static constexpr int KBytes = Widens ? WideBytes / 2 : StageBytes / 2;  // keys of a tile, before its values
  static constexpr int QueryBytes = Rows * D * 2;
  static constexpr int QueryOffset = WideOffset + kGroups * WideBytes;
  static constexpr int PipelineBytes = QueryOffset + QueryBytes;
  static constexpr int PartialStride = D + 8;  // floats; the pad keeps the fragments' stores free of conflicts
  static constexpr int PartialBytes = kGroups * Rows * PartialStride * 4;
  static constexpr int StatesOffset =
      PartialBytes;  // float2 (m, d) [Groups + 1][Rows], written when the pipeline is done
  static constexpr int ResultBytes = StatesOffset + (kGroups + 1) * Rows * 8;
  static constexpr int SlotsOffset =
      PipelineBytes > ResultBytes ? PipelineBytes : ResultBytes;  // int [Groups][Stages][Tokens]
  static constexpr int MaskOffset = SlotsOffset + kGroups * Stages * Tokens * 4;
  static constexpr int SharedBytes = MaskOffset;  // and, by its size, the mask
  static_assert(!Wgmma || (kWarps % 4 == 0 && D % 64 == 0), "a warpgroup owns 64 whole rows");
  static_assert(Tokens <= GroupThreads, "a thread of the group looks up each slot");
};

// Waits for the other threads of the group.
template <typename Tile>
__device__ __forceinline__ void group_sync(int group) {
  if constexpr (Tile::GroupThreads == 32) {
    __syncwarp();
  } else if constexpr (Tile::Groups == 1) {
    __syncthreads();
  } else {
    static_assert(Tile::Groups <= 3);
    if (group == 2) {  // by cases: the machine code then names the barrier, and reserves no other
      named_barrier(3, Tile::GroupThreads);
    } else if (group == 0) {
      named_barrier(1, Tile::GroupThreads);
    } else {
      named_barrier(2, Tile::GroupThreads);
    }
  }
}

template <int kD>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk, int rows) {
  if constexpr (kD % 64 == 0) {
    return (chunk >> 3) * rows * 128 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  } else {
    static_assert(kD == 96);
    return row * 192 + ((chunk ^ ((row >> 1) & 3)) << 4);
  }
}

}  // namespace trt_eagle3

#include "tree_fp8.cuh"  // knows tile_offset()

namespace trt_eagle3 {

// A fragment (16 rows x 16 columns) of the queries.
template <typename Tile>
__device__ __forceinline__ void load_query(uint32_t (&fragment)[4], uint32_t queries, int row0, int step, int lane) {
  const int row = row0 + (lane & 15);
  load_matrix4(fragment, queries + tile_offset<Tile::D>(row, step * 2 + (lane >> 4), Tile::Rows));
}

// Begins scores = queries . keys^T for this warp's 16 rows; finish_qk ends it. wgmma runs in between.
template <typename Tile>
__device__ __forceinline__ void start_qk(float (&scores)[Tile::Tokens / 8][4], uint32_t queries, uint32_t keys,
                                         int warp) {
#if TRT_EAGLE3_HAS_WGMMA
  if constexpr (Tile::Wgmma) {
    wgmma_pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::D / 16; ++step) {
      const uint32_t column = (step & 3) * 32;
      const uint32_t a = queries + (step >> 2) * Tile::Rows * 128 + (warp >> 2) * 64 * 128 + column;
      const uint32_t b = keys + (step >> 2) * Tile::Tokens * 128 + column;
      wgmma_ss<typename Tile::Factor>(scores, wgmma_descriptor(a, 16), wgmma_descriptor(b, 16), step != 0);
    }
    wgmma_commit();
  }
#endif
}

template <typename Tile>
__device__ __forceinline__ void finish_qk(float (&scores)[Tile::Tokens / 8][4],
                                          const uint32_t (&query)[Tile::Wgmma ? 1 : Tile::D / 16][4], uint32_t keys,
                                          int lane) {
  using T = typename Tile::T;
  if constexpr (Tile::Wgmma) {
#if TRT_EAGLE3_HAS_WGMMA
    wgmma_wait<0>();
    wgmma_pin(scores);
#endif
  } else if constexpr (Tile::Fp8) {
    fp8_scores<Tile>(scores, query, keys, lane);
  } else {
    // Few tiles: two sums per tile, over even and odd steps, so that the products do not wait for each other.
    constexpr int kSums = Tile::Tokens <= 16 ? 2 : 1;
    float sums[kSums][Tile::Tokens / 8][4] = {};
#pragma unroll
    for (int step = 0; step < Tile::D / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < Tile::Tokens / 16; ++pair) {
        const int row = pair * 16 + (lane & 7) + ((lane >> 4) << 3);
        uint32_t b[4];
        load_matrix4(b, keys + tile_offset<Tile::D>(row, step * 2 + ((lane >> 3) & 1), Tile::Tokens));
        mma<T>(sums[step % kSums][2 * pair], query[step], b[0], b[1]);
        mma<T>(sums[step % kSums][2 * pair + 1], query[step], b[2], b[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < Tile::Tokens / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[j][e] = sums[0][j][e] + (kSums > 1 ? sums[kSums - 1][j][e] : 0.0f);
    }
  }
}

// Begins out += weights . values; finish_pv ends it. The weights are rounded to Factor, as every tensor-core attention
// does.
template <typename Tile>
__device__ __forceinline__ void start_pv(float (&out)[Tile::D / 8][4], const float (&weights)[Tile::Tokens / 8][4],
                                         uint32_t values, int lane) {
  using T = typename Tile::Factor;
  uint32_t a[Tile::Tokens / 16][4];
#pragma unroll
  for (int step = 0; step < Tile::Tokens / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[step][2 * half] = pack2<T>(weights[2 * step + half][0], weights[2 * step + half][1]);
      a[step][2 * half + 1] = pack2<T>(weights[2 * step + half][2], weights[2 * step + half][3]);
    }
  }
  if constexpr (Tile::Wgmma) {
#if TRT_EAGLE3_HAS_WGMMA
    constexpr int kColumns = Tile::D < 128 ? Tile::D : 128;
    wgmma_pin(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::Tokens / 16; ++step) {
#pragma unroll
      for (int part = 0; part < Tile::D / kColumns; ++part) {
        const uint32_t b = values + part * (kColumns / 64) * Tile::Tokens * 128 + step * 2048;
        wgmma_rs<T>(reinterpret_cast<float (&)[kColumns / 8][4]>(out[part * kColumns / 8]), a[step],
                    wgmma_descriptor(b, Tile::Tokens * 128), 1);
      }
    }
    wgmma_commit();
#endif
  } else if constexpr (Tile::Fp8) {
    fp8_sums<Tile>(out, a, values, lane);
  } else {
#pragma unroll
    for (int step = 0; step < Tile::Tokens / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < Tile::D / 16; ++pair) {
        uint32_t b[4];
        load_matrix4_transposed(
            b, values + tile_offset<Tile::D>(step * 16 + (lane & 15), pair * 2 + (lane >> 4), Tile::Tokens));
        mma<T>(out[2 * pair], a[step], b[0], b[1]);
        mma<T>(out[2 * pair + 1], a[step], b[2], b[3]);
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void finish_pv(float (&out)[Tile::D / 8][4]) {
#if TRT_EAGLE3_HAS_WGMMA
  if constexpr (Tile::Wgmma) {
    wgmma_wait<0>();
    wgmma_pin(out);
  }
#endif
}

}  // namespace trt_eagle3
