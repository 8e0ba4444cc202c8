// QKNormMRope of many tokens, for heads of 128 channels of 16 bits.
//
// Idea: the bytes are few where a thread moves 16 at once and has several heads in flight, and the sines are few where
// a block makes those of its tokens once, a pair in each thread. Eight lanes own a head: lane i has channels 8 i to
// 8 i + 7 and the 8 that these turn with. Bytes moved: 2 * N * (Hq + 2 Hkv) * D * sizeof(T). Measured:
// docs/measurements.md, "Prompts".
#pragma once

#include "qk_norm_mrope_partial.cuh"

namespace trt_eagle3 {

template <typename Element>
struct PromptRope {
  using T = Element;
  static constexpr int Dim = 128, Lanes = 8, Threads = 256;
  static constexpr int Tokens = Threads / (Dim / 2);  // of a block
  static constexpr int AtOnce = Threads / Lanes;      // heads
  static constexpr int InFlight = 6;                  // heads of a lane, read before any is used
};

// Two values of 16 bits, the first in the low half.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t two) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&two));
  } else {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  }
}

// A lane's channels of a head: low and those that they turn with, in pairs.
template <typename Rope>
struct PromptRopeHead {
  using T = typename Rope::T;
  Pack<uint32_t, 4> low, high;

  __device__ __forceinline__ void read(const void* source, int64_t head, int lane) {
    const auto* packs = static_cast<const Pack<uint32_t, 4>*>(source) + head * (2 * Rope::Lanes) + lane;
    low = packs[0];
    high = packs[Rope::Lanes];
  }
  __device__ __forceinline__ void write(T* target, int lane) const {
    auto* packs = reinterpret_cast<Pack<uint32_t, 4>*>(target) + lane;
    packs[0] = low;
    packs[Rope::Lanes] = high;
  }

  __device__ __forceinline__ float inverse_rms(float epsilon) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack2<T>(low.values[i]), b = unpack2<T>(high.values[i]);
      squares += a.x * a.x + b.x * b.x;
      squares += a.y * a.y + b.y * b.y;
    }
#pragma unroll
    for (int lanes = Rope::Lanes / 2; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
    return rsqrtf(squares / Rope::Dim + epsilon);
  }

  // Scales by `scale` and `norm`, unless that is null; then turns. `turns`: cosine and sine, twice, of the i-th two of
  // the lane's pairs at i * Lanes.
  __device__ __forceinline__ void turn(const float4* turns, float scale, const void* norm, int lane) {
    PromptRopeHead weights;
    if (norm != nullptr) weights.read(norm, 0, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 by = turns[i * Rope::Lanes];
      float2 a = unpack2<T>(low.values[i]), b = unpack2<T>(high.values[i]);
      if (norm != nullptr) {
        const float2 c = unpack2<T>(weights.low.values[i]), d = unpack2<T>(weights.high.values[i]);
        a = make_float2(a.x * scale * c.x, a.y * scale * c.y);
        b = make_float2(b.x * scale * d.x, b.y * scale * d.y);
      }
      low.values[i] = pack2<T>(a.x * by.x - b.x * by.y, a.y * by.z - b.y * by.w);
      high.values[i] = pack2<T>(b.x * by.x + a.x * by.y, b.y * by.z + a.y * by.w);
    }
  }
};

// The cosine and sine of this thread's pair of its token, where a head's lanes read them.
template <typename Rope>
__device__ __forceinline__ void make_turns(const QKNormMRopeParams& p, int first, float2* turns) {
  const int pair = threadIdx.x % (Rope::Dim / 2), own = threadIdx.x / (Rope::Dim / 2);
  const int token = min(first + own, p.num_tokens - 1);
  const int axis = min(max(p.pair_axis[pair], 0), 2);  // an engine builder times kernels on inputs of any content
  const int position = p.position_ids[static_cast<int64_t>(axis) * p.num_tokens + token];
  float2 turn;
  sincosf(static_cast<float>(position) * p.inv_freq[pair], &turn.y, &turn.x);
  turns[own * (Rope::Dim / 2) + (pair % 8 / 2 * Rope::Lanes + pair / 8) * 2 + pair % 2] = turn;
}

// grid (blocks of Tokens tokens)
template <typename Rope>
__global__ void __launch_bounds__(Rope::Threads, 2) qk_norm_mrope_prompt_kernel(const QKNormMRopeParams p) {
  wait_for_previous_beside_next();
  using T = typename Rope::T;
  __shared__ __align__(16) float2 turns[Rope::Tokens * Rope::Dim / 2];
  const int lane = threadIdx.x % Rope::Lanes, first = blockIdx.x * Rope::Tokens;
  const int num_heads = p.num_heads + 2 * p.num_kv_heads, rotated = num_heads - p.num_kv_heads;
  const int count = min(Rope::Tokens, p.num_tokens - first) * num_heads;  // heads of the block
  const uint32_t inverse = 0xffffffffu / num_heads + 1;                   // heads of a block are few: exact
  const bool normed = p.q_norm != nullptr;
  for (int start = 0; start < count; start += Rope::AtOnce * Rope::InFlight) {
    const auto index_of = [&](int i) { return start + i * Rope::AtOnce + static_cast<int>(threadIdx.x) / Rope::Lanes; };
    PromptRopeHead<Rope> heads[Rope::InFlight];
#pragma unroll
    for (int i = 0; i < Rope::InFlight; ++i) {
      heads[i].read(p.qkv, static_cast<int64_t>(first) * num_heads + min(index_of(i), count - 1), lane);
    }
    if (start == 0) {
      make_turns<Rope>(p, first, turns);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Rope::InFlight; ++i) {
      const int index = min(index_of(i), count - 1), own = __umulhi(index, inverse), head = index - own * num_heads;
      const float scale = normed ? heads[i].inverse_rms(p.epsilon) : 1.0f;  // of all lanes
      if (head < rotated) {
        const float4* own_turns = reinterpret_cast<const float4*>(turns + own * (Rope::Dim / 2)) + lane;
        heads[i].turn(own_turns, scale, normed ? head < p.num_heads ? p.q_norm : p.k_norm : nullptr, lane);
      }
      if (index_of(i) < count) heads[i].write(rope_target<T>(p, first + own, head), lane);
    }
  }
}

template <typename T>
cudaError_t launch_qk_norm_mrope_prompt(const QKNormMRopeParams& p, cudaStream_t stream) {
  using Rope = PromptRope<T>;
  const int blocks = ceil_div(p.num_tokens, Rope::Tokens);
  return launch(Overlap::kYes, qk_norm_mrope_prompt_kernel<Rope>, blocks, Rope::Threads, 0, 1, stream, p);
}

constexpr int kManyRopeTokens = 256;

inline cudaError_t launch_qk_norm_mrope(const QKNormMRopeParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.head_dim > 256 || p.head_dim % 4 != 0) return cudaErrorInvalidValue;
  const bool aligned = ((reinterpret_cast<uintptr_t>(p.qkv) | reinterpret_cast<uintptr_t>(p.q) |
                         reinterpret_cast<uintptr_t>(p.k) | reinterpret_cast<uintptr_t>(p.v) |
                         reinterpret_cast<uintptr_t>(p.q_norm) | reinterpret_cast<uintptr_t>(p.k_norm)) %
                        16) == 0;
  const bool whole = 2 * p.num_pairs == p.head_dim && p.weight_offset == 0.0f;
  return with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (!whole) return launch_qk_norm_mrope_partial<T>(p, stream);
    if constexpr (sizeof(T) == 2) {
      if (p.num_tokens >= kManyRopeTokens && p.head_dim == 128 && aligned) {
        return launch_qk_norm_mrope_prompt<T>(p, stream);
      }
    }
    if (p.head_dim <= 128) return launch_qk_norm_mrope_as<RopeLayout<T, 2, 1>>(p, stream);
    return launch_qk_norm_mrope_as<RopeLayout<T, 2, 2>>(p, stream);
  });
}

}  // namespace trt_eagle3
