// Rows as numbers of eight bits and scales, for products of bytes: scale = largest |x| / 448 (e4m3) or / 127 (int8), of a
// row or of each 128 columns of it, and x times 448 / largest rounded once, in packed_weight.cuh's order of columns. Or
// the values that e4m3 stands for, as T, for products with few rows. Rows come from memory, or as SiluMul or AddRmsNorm
// make them, rounded to T as those do: then nobody writes them.
//
// Idea: a block owns a row, reads it once and keeps it in registers unless it is very wide; eight lanes exchange what
// makes whole stores of the packed order. Bytes moved: what the row is made of, and half of T or as much written.
// Measured: docs/measurements.md, "Quantised weights".
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace trt_eagle3 {

constexpr int kQuantiseThreads = 256;
constexpr int kQuantiseWarps = kQuantiseThreads / 32;
constexpr float kSmallest = 1e-30f;  // what is smaller counts as 0: its factor may be infinite
constexpr int kMostPacks = 6;        // eight values each that a thread keeps between the two times it wants them

// Where codes and scales go: QuantiseRowsParams without its x.
struct QuantiseTarget {
  void* q;
  float* scale;
  int32_t num_rows, inner, groups, rounds, integers;
  DType dtype;

  template <typename Params>
  static QuantiseTarget of(const Params& p) {
    return {p.q, p.scale, p.num_rows, p.inner, p.groups, p.rounds, p.integers, p.dtype};
  }
};

// Rows [M, K] in memory.
template <typename Element>
struct RowSource {
  using T = Element;
  static constexpr bool Normed = false;
  const T* x;

  __device__ __forceinline__ Pack<T, 8> load(int64_t row, int i, int packs) const {
    return reinterpret_cast<const Pack<T, 8>*>(x)[row * packs + i];
  }
};

// silu(gate) * up of [M, 2 K].
template <typename Element>
struct SiluSource {
  using T = Element;
  static constexpr bool Normed = false;
  const T* gate_up;

  __device__ __forceinline__ Pack<T, 8> load(int64_t row, int i, int packs) const {
    const auto* gates = reinterpret_cast<const Pack<T, 8>*>(gate_up) + 2 * row * packs;
    const Pack<T, 8> gate = gates[i], up = gates[packs + i];
    Pack<T, 8> out;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      out.values[e] = from_float<T>(silu<T>(to_float(gate.values[e])) * to_float(up.values[e]));
    }
    return out;
  }
};

// RMSNorm of x + residual, whose sum is kept too.
template <typename Element>
struct NormSource {
  using T = Element;
  static constexpr bool Normed = true;
  const T *x, *residual, *weight;
  T* sum;
  float epsilon;

  __device__ __forceinline__ Pack<T, 8> load(int64_t row, int i, int packs) const {
    Pack<T, 8> values = reinterpret_cast<const Pack<T, 8>*>(x)[row * packs + i];
    if (residual == nullptr) return values;
    const auto other = reinterpret_cast<const Pack<T, 8>*>(residual)[row * packs + i];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      values.values[e] = from_float<T>(to_float(values.values[e]) + to_float(other.values[e]));
    }
    reinterpret_cast<Pack<T, 8>*>(sum)[row * packs + i] = values;
    return values;
  }

  // Adds in add_rms_norm.cuh's order, whose threads have one pack each.
  template <int kPacks>
  __device__ __forceinline__ void normalise(Pack<T, 8> (&kept)[kPacks], int packs) const {
    static_assert(kPacks * kQuantiseWarps <= 32);
    __shared__ float parts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float squares = 0.0f;
      if (k * kQuantiseThreads + threadIdx.x < packs) {
#pragma unroll
        for (int e = 0; e < 8; ++e) squares += to_float(kept[k].values[e]) * to_float(kept[k].values[e]);
      }
      squares = warp_sum(squares);
      if (lane == 0) parts[k * kQuantiseWarps + warp] = squares;
    }
    __syncthreads();
    const float squares = warp_sum(lane < kPacks * kQuantiseWarps ? parts[lane] : 0.0f);
    const float inverse_rms = rsqrtf(squares / (packs * 8) + epsilon);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = k * kQuantiseThreads + threadIdx.x;
      if (i >= packs) break;
      const auto factors = reinterpret_cast<const Pack<T, 8>*>(weight)[i];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        kept[k].values[e] = from_float<T>(to_float(kept[k].values[e]) * inverse_rms * to_float(factors.values[e]));
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ void unpack_eight(const Pack<T, 8>& pack, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = to_float(pack.values[i]);
}

__device__ __forceinline__ float largest(const float (&values)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  return most;
}

// What the codes of e4m3 and int8 are made by; `most`: of the values that share a scale.
struct E4m3Codes {
  static constexpr bool Sums = false;
  static constexpr float Largest = 448.0f;
  static __device__ __forceinline__ uint32_t four(const float* v, float factor) {
    const float2 low = make_float2(v[0] * factor, v[1] * factor), high = make_float2(v[2] * factor, v[3] * factor);
    return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
           static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
  }
};
struct Int8Codes {
  static constexpr bool Sums = true;
  static constexpr float Largest = 127.0f;
  static __device__ __forceinline__ uint32_t four(const float* v, float factor) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= (__float2int_rn(v[i] * factor) & 0xFF) << 8 * i;
    return codes;
  }
  static __device__ __forceinline__ int sum(uint2 codes) {
    return __dp4a(static_cast<int>(codes.x), 0x01010101, __dp4a(static_cast<int>(codes.y), 0x01010101, 0));
  }
};

template <typename Codes>
__device__ __forceinline__ float scale_of(float most) {
  return most > kSmallest ? most / Codes::Largest : 1.0f;
}
template <typename Codes>
__device__ __forceinline__ float factor_of(float most) {
  return most > kSmallest ? Codes::Largest / most : 1.0f;
}

// Codes of 8 columns, pairs 0 and 1 in x and 2 and 3 in y. Of each 64 columns eight lanes have them; each stores 8
// bytes of the packed order: what pair t of both halves of two times 16 columns are. `unit`: the 64 columns' place.
__device__ __forceinline__ void store_packed(uint2 codes, char* unit) {
  const unsigned lanes = 0xFFu << (threadIdx.x & 24);
  const bool upper = threadIdx.x & 1, odd = threadIdx.x & 2;  // half of 16 columns; which of two times 16
  const uint32_t half = __shfl_xor_sync(lanes, upper ? codes.x : codes.y, 1);
  const uint32_t first = upper ? half : codes.x, second = upper ? codes.y : half;  // halves of two pairs
  const uint32_t low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
  const uint32_t other = __shfl_xor_sync(lanes, odd ? low : high, 2);
  const int pair = (threadIdx.x & 1) * 2 + odd, sixteens = threadIdx.x / 4 & 1;
  *reinterpret_cast<uint2*>(unit + pair * 16 + sixteens * 8) = odd ? make_uint2(other, high) : make_uint2(low, other);
}

// The values of those codes, in their own order.
template <typename T>
__device__ __forceinline__ void store_rounded(uint2 codes, float scale, T* place) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>((i < 2 ? codes.x : codes.y) >> i % 2 * 16 & 0xFFFF);
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    pairs[i] = pack2<T>(values.x * scale, values.y * scale);
  }
  *reinterpret_cast<uint4*>(place) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__device__ __forceinline__ float block_max(float value) {
  __shared__ float warps[kQuantiseWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < kQuantiseWarps; ++i) value = fmaxf(value, warps[i]);
  return value;
}

// Of all threads' numbers, exactly; for thread 0.
__device__ __forceinline__ int block_total(int value) {
  __shared__ int warps[kQuantiseWarps];
  value = __reduce_add_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  int total = 0;
  for (int i = 0; i < kQuantiseWarps; ++i) total += warps[i];
  return total;
}

// Of the sixteen lanes that have 128 columns.
__device__ __forceinline__ float group_max(float value) {
  const unsigned lanes = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(lanes, value, offset));
  return value;
}

// A block per row; with kGroups a scale for each 128 columns. kPacks: those that a thread keeps; 0: it makes them twice.
template <typename Source, typename Codes, bool kGroups, int kPacks>
__global__ void __launch_bounds__(kQuantiseThreads) quantise_rows_kernel(const Source source, const QuantiseTarget p) {
  using T = typename Source::T;
  wait_for_previous();
  const int64_t row = blockIdx.x;
  char* q = static_cast<char*>(p.q) + row * p.inner;
  T* rounded = static_cast<T*>(p.q) + row * p.inner;
  float* scales = p.scale + row;
  const int packs = p.inner / 8;
  Pack<T, 8> kept[kPacks > 0 ? kPacks : 1];
  float values[8], most = 0.0f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = k * kQuantiseThreads + threadIdx.x;
    if (i < packs) kept[k] = source.load(row, i, packs);
  }
  if constexpr (Source::Normed) source.normalise(kept, packs);
  if constexpr (!kGroups) {
    for (int k = 0; kPacks > 0 ? k < kPacks : k * kQuantiseThreads < packs; ++k) {
      const int i = k * kQuantiseThreads + threadIdx.x;
      if (i >= packs) break;
      unpack_eight(kPacks > 0 ? kept[k] : source.load(row, i, packs), values);
      most = fmaxf(most, largest(values));
    }
    most = block_max(most);
    if (threadIdx.x == 0) *scales = scale_of<Codes>(most);
  }
  int sum = 0;
#pragma unroll
  for (int k = 0; kPacks > 0 ? k < kPacks : k * kQuantiseThreads < packs; ++k) {
    const int i = k * kQuantiseThreads + threadIdx.x;
    if (i >= packs) break;  // of sixteen lanes all or none
    unpack_eight(kPacks > 0 ? kept[k] : source.load(row, i, packs), values);
    if constexpr (kGroups) {
      most = group_max(largest(values));
      if (threadIdx.x % 16 == 0) scales[static_cast<int64_t>(i / 16) * p.num_rows] = scale_of<Codes>(most);
    }
    const float factor = factor_of<Codes>(most);
    const uint2 codes = make_uint2(Codes::four(values, factor), Codes::four(values + 4, factor));
    if constexpr (Codes::Sums) sum += Codes::sum(codes);
    if (p.rounds) {
      store_rounded(codes, scale_of<Codes>(most), rounded + i * 8);
    } else {
      store_packed(codes, q + i / 8 * 64);
    }
  }
  if constexpr (Codes::Sums) {
    sum = block_total(sum);
    if (threadIdx.x == 0) scales[p.num_rows] = static_cast<float>(sum);
  }
}

template <bool kGroups, int kPacks, typename Source>
cudaError_t launch_quantise(const Source& source, const QuantiseTarget& p, cudaStream_t stream) {
  const auto kernel = quantise_rows_kernel<Source, E4m3Codes, kGroups, kPacks>;
  if constexpr (!kGroups) {
    if (p.integers) {
      const auto integers = quantise_rows_kernel<Source, Int8Codes, false, kPacks>;
      return launch(Overlap::kYes, integers, dim3(p.num_rows), kQuantiseThreads, 0, 1, stream, source, p);
    }
  }
  return launch(Overlap::kYes, kernel, dim3(p.num_rows), kQuantiseThreads, 0, 1, stream, source, p);
}

template <typename Source>
cudaError_t quantise(const Source& source, const QuantiseTarget& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  const int packs = ceil_div(p.inner / 8, kQuantiseThreads);
  if constexpr (Source::Normed) {
    if (packs > 4) return cudaErrorNotSupported;
    if (p.groups > 1) {
      return packs <= 2 ? launch_quantise<true, 2>(source, p, stream) : launch_quantise<true, 4>(source, p, stream);
    }
    return packs <= 2 ? launch_quantise<false, 2>(source, p, stream) : launch_quantise<false, 4>(source, p, stream);
  } else {
    if (p.groups > 1) return launch_quantise<true, 0>(source, p, stream);
    if (packs <= 2) return launch_quantise<false, 2>(source, p, stream);
    return packs <= kMostPacks ? launch_quantise<false, kMostPacks>(source, p, stream)
                               : launch_quantise<false, 0>(source, p, stream);
  }
}

}  // namespace trt_eagle3
