// GatedDelta: the gated delta rule over a tree of up to 64 rows of each sequence, or a longer chain in chunks, with the
// convolution before it and the gated norm behind it, in one launch.
//
// Idea: the rows of a chunk are solved together (graph/ops/gated_delta.py), so that the state of a head passes through
// registers once, read before what the launch waits for, and no state is kept per row. A block has a head, of few
// sequences a part of its columns, which need no other column up to the norm; the blocks of a head are a cluster, which
// meets for that alone. Every task of a warp waits for memory once, and two blocks share a multiprocessor where rows
// are few: what bounds a step of many sequences is how many bytes are in flight.
// Bytes moved: the state read and written once, 8 * Hv * Dk * Dv a sequence; the rows. Measured: docs/measurements.md,
// "Qwen3.5 on CUDA".
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "chip.cuh"
#include "gated_delta_rows.cuh"
#include "gated_delta_state.cuh"

namespace trt_eagle3 {

// The meetings of a head's blocks, where there are several.
struct DeltaCluster {
  __device__ __forceinline__ static void arrive() {
#if __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) cooperative_groups::this_cluster().barrier_arrive();
#endif
  }
  __device__ __forceinline__ static void wait() {
#if __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) cooperative_groups::this_cluster().barrier_wait();
#endif
  }
  // Over the blocks, in their order.
  __device__ __forceinline__ static float sum(float* own) {
#if __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) {
      float total = 0.0f;
      for (int rank = 0; rank < static_cast<int>(gridDim.x); ++rank) {
        total += *cooperative_groups::this_cluster().map_shared_rank(own, rank);
      }
      return total;
    }
#endif
    return *own;
  }
};

// RMSNorm of o by heads, times silu(z).
template <typename T>
struct DeltaNorm {
  const GatedDeltaParams& p;
  const DeltaBlock& b;
  const DeltaShared& s;

  // Squares of the block's columns of each row, of o rounded to T; a meeting of the cluster follows.
  __device__ __forceinline__ void sum_squares(int count) const {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int i = threadIdx.x / 32; i < count; i += warps) {
      float sum = 0.0f;
      for (int column = lane; column < b.columns; column += 32) {
        const float o = rounded<T>(s.found[s.place(i, column)]);
        sum += o * o;
      }
      sum = warp_sum(sum);
      if (lane == 0) s.squares[i] = sum;
    }
  }

  // What a thread's four numbers `i` of a chunk are multiplied with; read while others still compute.
  struct Factors {
    Quad<T> z, weight;
  };
  __device__ __forceinline__ Factors factors(int start, int count, int i) const {
    Factors found = {};
    const int row = i / 32, column = b.first_column + i % 32 * 4;
    if (row >= count || !has(i)) return found;
    const int64_t n = static_cast<int64_t>(b.sequence) * p.num_new + start + row;
    const T* z = static_cast<const T*>(p.qkvz) + n * (p.channels + values()) + p.channels + b.head * p.value_dim;
    found.z = load_quad(z + column);
    found.weight = load_quad(static_cast<const T*>(p.norm) + column);
    return found;
  }

  __device__ __forceinline__ void write(int start, int i, const Factors& factors) const {
    const int row = i / 32, column = b.first_column + i % 32 * 4;
    if (!has(i)) return;
    const int64_t n = static_cast<int64_t>(b.sequence) * p.num_new + start + row;
    const float mean = DeltaCluster::sum(s.squares + row) / static_cast<float>(p.value_dim);
    const float scale = 1.0f / sqrtf(mean + p.epsilon);
    const float* found = s.found + s.place(row, column - b.first_column);
    float z[4], weight[4], out[4];
    unpack<T>(factors.z, z);
    unpack<T>(factors.weight, weight);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float unit = rounded<T>(rounded<T>(found[e]) * scale);
      out[e] = rounded<T>(weight[e] * unit) * silu<T>(z[e]);
    }
    store4(static_cast<T*>(p.out) + n * values() + b.head * p.value_dim + column, out);
  }

 private:
  __device__ __forceinline__ int values() const { return p.num_v_heads * p.value_dim; }
  // A warp has a row; lanes past the block's columns have nothing to do.
  __device__ __forceinline__ bool has(int i) const {
    return i % 32 * 4 < b.columns && b.first_column + i % 32 * 4 < p.value_dim;
  }
};

constexpr int kDeltaThreads = 32 * kDeltaWidth / kDeltaColumns;  // at most

// grid (blocks of a head, Hv, B), which are a cluster along x; kBlocks share a multiprocessor.
template <typename T, int kBlocks>
__global__ void __launch_bounds__(kDeltaThreads, kBlocks) gated_delta_kernel(const GatedDeltaParams p) {
  extern __shared__ __align__(16) char shared[];
  const DeltaBlock b(p);
  const DeltaShared s(shared, p.rows_at_once, p.taps, b.columns);
  constexpr bool kStep = kBlocks > 1;  // all rows are one chunk, of a tree
  const DeltaPaths paths{s.paths, s.parents, kStep || p.num_new <= kDeltaTreeRows};
  const DeltaRows<T> rows{p, b, s, paths};
  const DeltaNorm<T> norm{p, b, s};
  DeltaState state;
  const DeltaRule rule{p, b, s, state};
  const int read = p.state_reads[b.sequence];
  const int columns = p.value_dim - b.first_column;
  const int64_t size = static_cast<int64_t>(p.key_dim) * p.value_dim;
  const auto matrix = [&](int entry) {
    return p.delta_state + (static_cast<int64_t>(entry) * p.num_v_heads + b.head) * size + b.first_column;
  };
  const auto store = [&] { state.store(matrix(p.state_writes[b.sequence]), p.key_dim, p.value_dim, columns); };
  state.load(matrix(read), p.key_dim, p.value_dim, columns);
  rows.load_weight();
  paths.read(p, b.sequence);
  wait_for_previous();  // a launch whose states are not prefetch_safe did not come up before it could pass here
  __syncthreads();
  if (!kStep && rows.certain() == 0) store();
#pragma unroll 1
  for (int start = 0; start < p.num_new; start += p.rows_at_once) {
    const int count = kStep ? p.num_new : min(p.rows_at_once, p.num_new - start), stop = start + count;
    rows.convolve(read, start, count);
    if (start == 0) rows.write_window(read);
    __syncthreads();
    rows.sum_gates(count);
    __syncthreads();
    if constexpr (kStep) {
      rows.meet_in_pairs(count);
    } else {
      rows.meet(count);
    }
    rule.read_state(count);
    auto factors = norm.factors(start, count, threadIdx.x);
    rule.solve(count);
    __syncthreads();
    norm.sum_squares(count);
    __syncthreads();
    DeltaCluster::arrive();
    const int certain = rows.certain();
    const bool ends = kStep || (certain > start && certain <= stop);
    if (ends) {
      rule.advance(0, certain - start);
      store();
    }
    if (!kStep && stop < p.num_new) rule.advance(ends ? certain - start : 0, count);
    DeltaCluster::wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < count * 32; i += blockDim.x) {
      norm.write(start, i, factors);
      factors = norm.factors(start, count, i + blockDim.x);
    }
    DeltaCluster::arrive();  // the others have read this block's squares
    __syncthreads();
    DeltaCluster::wait();
    if (kStep) break;
  }
}

// Rows at once: all of a tree, a chunk of a chain.
inline int delta_rows_at_once(const GatedDeltaParams& p) {
  if (p.num_new <= kDeltaTreeRows) return p.num_new;
  return p.chunk_rows > 0 ? std::min(p.chunk_rows, kDeltaTreeRows) : kDeltaChunk;
}

template <typename T, int kBlocks>
cudaError_t run_gated_delta(const GatedDeltaParams& p, const Chip& chip, int cluster, cudaStream_t stream) {
  const int all = ceil_div(p.value_dim, kDeltaGroup), groups = ceil_div(all, cluster);
  const int bytes = DeltaShared::bytes(p.rows_at_once, p.taps, groups * kDeltaGroup);
  if (bytes > chip.shared_bytes) return cudaErrorNotSupported;
  const auto kernel = gated_delta_kernel<T, kBlocks>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  const dim3 grid(ceil_div(all, groups), p.num_v_heads, p.batch);
  return launch(overlap, kernel, grid, groups * kDeltaParts * 32, bytes, grid.x, stream, p);
}

// Blocks of a head, on Hopper: two where heads are fewer than half of the multiprocessors and rows are few; else what
// all columns share (q, k, how rows meet) is done once. Elsewhere one block has all columns.
inline int delta_blocks(const GatedDeltaParams& p, const Chip& chip) {
  if (chip.major < 9) return 1;
  if (p.blocks_per_head > 0) return std::min(p.blocks_per_head, 4);
  const bool few = static_cast<int64_t>(p.num_v_heads) * p.batch * 2 <= chip.sms;
  return few && p.num_new <= kDeltaStepRows ? 2 : 1;
}

template <typename T>
cudaError_t launch_gated_delta(const GatedDeltaParams& params, cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  const bool fits = params.key_dim <= kDeltaDepth && params.value_dim <= kDeltaWidth && params.taps <= kDeltaTaps &&
                    params.key_dim % 4 == 0 && params.value_dim % 4 == 0;
  if (!fits) return cudaErrorNotSupported;
  GatedDeltaParams p = params;
  p.rows_at_once = delta_rows_at_once(p);
  const int blocks = delta_blocks(p, chip);
  [[maybe_unused]] const bool step = chip.major >= 9 && p.num_new <= kDeltaStepRows;
  if constexpr (sizeof(T) == 2) {
    if (step) return run_gated_delta<T, 2>(p, chip, blocks, stream);
  }
  return run_gated_delta<T, 1>(p, chip, blocks, stream);
}

}  // namespace trt_eagle3
