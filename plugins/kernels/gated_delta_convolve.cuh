// GatedDelta by tensor cores: a chunk's rows of a head of q, k or v by the causal convolution, and its gates.
#pragma once

#include "gated_delta_fragments.cuh"

namespace trt_eagle3 {

// The rows of a chunk of a sequence; row 0 is `start` of the launch's rows. 256 threads.
template <typename T>
struct DeltaConvolution {
  static constexpr int kPitch = kDeltaDepth + 8;  // of a tile [64, kPitch] in shared memory
  static constexpr int kWarpRows = kDeltaChunkRows / (kDeltaMmaThreads / 32);
  static constexpr int kFewTaps = 4, kAtOnce = 4;  // rows whose loads are under way

  const GatedDeltaParams& p;
  const DeltaPaths& paths;
  int sequence, start, read;

  // Begins to fetch the chunk's rows of `width` channels from `channel` on.
  __device__ __forceinline__ void prefetch(int channel, int width) const {
    constexpr int kLine = 128 / static_cast<int>(sizeof(T));
    const int lines = ceil_div(width, kLine), count = min(kDeltaChunkRows, p.num_new - start);
    for (int i = threadIdx.x; i < count * lines; i += kDeltaMmaThreads) {
      prefetch_l2(source(start + i / lines, channel + i % lines * kLine));
    }
  }

  // The taps of `width` channels from `channel` on, as [taps, kDeltaDepth]; 0 behind them. A barrier follows.
  __device__ __forceinline__ void load_weight(int channel, int width, float* weight) const {
    const T* source = static_cast<const T*>(p.conv_weight) + static_cast<int64_t>(channel) * p.taps;
    for (int i = threadIdx.x; i < kDeltaDepth * p.taps; i += kDeltaMmaThreads) {
      weight[i % p.taps * kDeltaDepth + i / p.taps] = i < width * p.taps ? to_float(source[i]) : 0.0f;
    }
  }

  // silu of the convolution of `width` channels from `channel` on, as T, then kUnit: each row times `length` over its
  // length. Of the first rows it keeps what came in, and in float32 what goes out, from `kept` of a row on, if not -1.
  template <bool kUnit>
  __device__ __forceinline__ void run(int channel, int width, const float* weight, float length, int kept, T* tile) const {
    const int first = threadIdx.x / 32 * kWarpRows;
#pragma unroll 1
    for (int some = first; some < first + kWarpRows; some += kAtOnce) {
      if (!paths.tree && p.taps <= kFewTaps && start + some >= kFewTaps - 1) {
        run_together<kUnit>(some, channel, width, weight, length, kept, tile);
        continue;
      }
#pragma unroll 1
      for (int i = some; i < some + kAtOnce; ++i) run_alone<kUnit>(i, channel, width, weight, length, kept, tile);
    }
  }

  // g and beta of a value head of every row, 0 of those behind the last; of the first rows kept. A barrier follows.
  __device__ __forceinline__ void gates(int head, float* gate, float* beta) const {
    const int i = threadIdx.x;
    if (i >= kDeltaChunkRows) return;
    gate[i] = beta[i] = 0.0f;
    if (start + i >= p.num_new) return;
    const DeltaGates own = DeltaGates::of<T>(p, sequence, start + i, head);
    gate[i] = own.g;
    beta[i] = own.beta;
    if (start + i < p.kept) own.keep(p, sequence, start + i, head);
  }

  // Sums of g along paths, by four lanes each. A barrier follows.
  __device__ __forceinline__ void sum_gates(const float* gate, float* decay) const {
    const int i = threadIdx.x / 4;
    float sum = 0.0f;
#pragma unroll 4
    for (int j = threadIdx.x % 4; j <= i; j += 4) sum += paths.sees(i, j) ? gate[j] : 0.0f;
    sum = quad_sum(sum);
    if (threadIdx.x % 4 == 0) decay[i] = sum;
  }

  // The rows that the convolution of the first row after `certain` ones sees, of `width` channels from `channel` on.
  __device__ __forceinline__ void write_window(int write, int certain, int channel, int width) const {
    for (int i = threadIdx.x; i < width * (p.taps - 1); i += kDeltaMmaThreads) {
      const int w = i / width, own = channel + i % width;
      const int64_t to = static_cast<int64_t>(write) * (p.taps - 1) + w;
      static_cast<T*>(p.conv_state)[to * p.channels + own] = *source(certain + w - (p.taps - 1), own);
    }
  }

 private:
  // kAtOnce rows of a chain, of which none has taps in the state.
  template <bool kUnit>
  __device__ __forceinline__ void run_together(int some, int channel, int width, const float* weight, float length,
                                               int kept, T* tile) const {
    const int own = threadIdx.x % 32 * 4, before = start + some - (kFewTaps - 1), stride = p.channels + values();
    const T* base = static_cast<const T*>(p.qkvz) +
                    (static_cast<int64_t>(sequence) * p.num_new + before) * stride + channel + own;
    Pack<T, 4> rows[kAtOnce + kFewTaps - 1];
#pragma unroll
    for (int e = 0; e < kAtOnce + kFewTaps - 1; ++e) {
      const bool there = own < width && before + e < p.num_new;
      rows[e] = there ? *reinterpret_cast<const Pack<T, 4>*>(base + static_cast<int64_t>(e) * stride) : zeros();
    }
    float total[kAtOnce][4] = {};
#pragma unroll
    for (int tap = kFewTaps - 1; tap >= 0; --tap) {
      const int from = tap - (kFewTaps - p.taps);
      if (from < 0) continue;
      float taps[4];
      load4(weight + from * kDeltaDepth + own, taps);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(rows[i + tap], taps, total[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      finish<kUnit>(some + i, channel, width, total[i], rows[i + kFewTaps - 1], length, kept, tile);
    }
  }

  template <bool kUnit>
  __device__ __forceinline__ void run_alone(int i, int channel, int width, const float* weight, float length, int kept,
                                            T* tile) const {
    const int own = threadIdx.x % 32 * 4;
    const bool there = own < width && start + i < p.num_new;
    float total[4] = {};
    int at = start + i;
    for (int tap = p.taps - 1; tap >= 0; --tap) {
      float taps[4];
      load4(weight + tap * kDeltaDepth + own, taps);
      add(load(at, channel + own, there), taps, total);
      at = paths.above(at);
    }
    finish<kUnit>(i, channel, width, total, load(start + i, channel + own, there), length, kept, tile);
  }

  __device__ __forceinline__ int values() const { return p.num_v_heads * p.value_dim; }

  __device__ __forceinline__ const T* source(int place, int channel) const {
    return delta_source<T>(p, sequence, read, place, channel);
  }

  // Zeros where nothing is there.
  __device__ __forceinline__ Pack<T, 4> load(int place, int channel, bool there) const {
    return there ? *reinterpret_cast<const Pack<T, 4>*>(source(place, channel)) : zeros();
  }

  static __device__ __forceinline__ Pack<T, 4> zeros() {
    Pack<T, 4> none;
#pragma unroll
    for (int e = 0; e < 4; ++e) none.values[e] = from_float<T>(0.0f);
    return none;
  }

  static __device__ __forceinline__ void add(const Pack<T, 4>& row, const float (&taps)[4], float (&total)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] += to_float(row.values[e]) * taps[e];
  }

  template <bool kUnit>
  __device__ __forceinline__ void finish(int i, int channel, int width, const float (&total)[4],
                                         const Pack<T, 4>& raw, float length, int kept, T* tile) const {
    const int own = threadIdx.x % 32 * 4, place = start + i;
    const bool there = own < width && place < p.num_new;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = there ? rounded<T>(silu<T>(rounded<T>(total[e]))) : 0.0f;
    if (kUnit) make_unit(x, length);
    store4(tile + i * kPitch + own, x);
    if (!there || place >= p.kept) return;
    T* rows = static_cast<T*>(p.conv_rows) + (static_cast<int64_t>(sequence) * p.kept + place) * p.channels;
    *reinterpret_cast<Pack<T, 4>*>(rows + channel + own) = raw;
    if (kept >= 0) keep4(delta_row(p, sequence, place) + kept + own, x);
  }
};

}  // namespace trt_eagle3
