// GatedDelta: the gated delta rule over a tree of up to 64 rows of each sequence, or a longer chain in chunks, with the
// convolution before it and the gated norm behind it, in one launch.
//
// Idea: the rows of a chunk are solved together (graph/ops/gated_delta.py), so that the state of a head passes through
// registers once, read before what the launch waits for, and no state is kept per row. A warp has 8 columns of a head's
// state, which need no other column up to the norm; the blocks of a head are a cluster, which meets for that alone.
// Bytes moved: the state read and written once, 8 * Hv * Dk * Dv a sequence; the rows. Measured: nothing yet.
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
        const float o = rounded<T>(s.found[place(i, column)]);
        sum += o * o;
      }
      sum = warp_sum(sum);
      if (lane == 0) s.squares[i] = sum;
    }
  }

  __device__ __forceinline__ void write(int start, int count) const {
    const int packs = b.columns / 4, values = p.num_v_heads * p.value_dim;
    for (int i = threadIdx.x; i < count * packs; i += blockDim.x) {
      const int row = i / packs, column = i % packs * 4, own = b.head * p.value_dim + b.first_column + column;
      if (b.first_column + column >= p.value_dim) continue;
      const int64_t n = static_cast<int64_t>(b.sequence) * p.num_new + start + row;
      float z[4], weight[4], out[4];
      load4(static_cast<const T*>(p.qkvz) + n * (p.channels + values) + p.channels + own, z);
      load4(static_cast<const T*>(p.norm) + b.first_column + column, weight);
      const float mean = DeltaCluster::sum(s.squares + row) / static_cast<float>(p.value_dim);
      const float scale = 1.0f / sqrtf(mean + p.epsilon);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float unit = rounded<T>(rounded<T>(s.found[place(row, column + e)]) * scale);
        out[e] = rounded<T>(weight[e] * unit) * silu<T>(z[e]);
      }
      store4(static_cast<T*>(p.out) + n * values + own, out);
    }
  }

 private:
  __device__ __forceinline__ int place(int row, int column) const {
    return (column / kDeltaColumns * p.rows_at_once + row) * kDeltaColumns + column % kDeltaColumns;
  }
};

// grid (blocks of a head, Hv, B), which are a cluster along x. kThreads: at most.
template <typename T, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) gated_delta_kernel(const GatedDeltaParams p) {
  extern __shared__ __align__(16) char shared[];
  const DeltaBlock b(p);
  const DeltaShared s(shared, p.rows_at_once, p.taps, b.columns);
  const DeltaPaths paths{s.paths, s.parents, p.num_new <= kDeltaTreeRows};
  const DeltaRows<T> rows{p, b, s, paths};
  const DeltaNorm<T> norm{p, b, s};
  DeltaState state;
  const DeltaRule rule(p, s, state);
  const int read = p.state_reads[b.sequence], write = p.state_writes[b.sequence];
  const int certain = min(max(p.certain[b.sequence], 0), p.num_new);
  const int column = b.first_column + threadIdx.x / 32 * kDeltaColumns;
  const int64_t size = static_cast<int64_t>(p.key_dim) * p.value_dim;
  const auto matrix = [&](int entry) {
    return p.delta_state + (static_cast<int64_t>(entry) * p.num_v_heads + b.head) * size + column;
  };
  state.load(matrix(read), p.key_dim, p.value_dim, p.value_dim - column);
  rows.load_weight();
  paths.read(p, b.sequence);
  wait_for_previous();  // a launch whose states are not prefetch_safe did not come up before it could pass here
  __syncthreads();
  rows.write_window(read, write, certain);
  if (certain == 0) state.store(matrix(write), p.key_dim, p.value_dim, p.value_dim - column);
#pragma unroll 1
  for (int start = 0; start < p.num_new; start += p.rows_at_once) {
    const int count = min(p.rows_at_once, p.num_new - start), stop = start + count;
    rows.convolve(read, start, count);
    __syncthreads();
    rows.sum_gates(count);
    __syncthreads();
    rows.meet(count);
    rule.read_state(count);
    __syncthreads();
    rule.solve(count);
    __syncthreads();
    norm.sum_squares(count);
    __syncthreads();
    DeltaCluster::arrive();
    const bool ends = certain > start && certain <= stop;
    if (ends) {
      rule.advance(0, certain - start);
      state.store(matrix(write), p.key_dim, p.value_dim, p.value_dim - column);
    }
    if (stop < p.num_new) rule.advance(ends ? certain - start : 0, count);
    DeltaCluster::wait();
    norm.write(start, count);
    DeltaCluster::arrive();  // the others have read this block's squares
    __syncthreads();
    DeltaCluster::wait();
  }
}

// Rows at once: all of a tree, a chunk of a chain.
inline int delta_rows_at_once(const GatedDeltaParams& p) {
  if (p.num_new <= kDeltaTreeRows) return p.num_new;
  return p.chunk_rows > 0 ? std::min(p.chunk_rows, kDeltaTreeRows) : kDeltaChunk;
}

template <typename T, int kThreads, int kBlocks>
cudaError_t run_gated_delta(const GatedDeltaParams& p, const Chip& chip, int cluster, cudaStream_t stream) {
  const int warps = ceil_div(ceil_div(p.value_dim, kDeltaColumns), cluster);
  const int bytes = DeltaShared::bytes(p.rows_at_once, p.taps, warps * kDeltaColumns);
  if (bytes > chip.shared_bytes) return cudaErrorNotSupported;
  const auto kernel = gated_delta_kernel<T, kThreads, kBlocks>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  const dim3 grid(ceil_div(ceil_div(p.value_dim, kDeltaColumns), warps), p.num_v_heads, p.batch);
  return launch(overlap, kernel, grid, warps * 32, bytes, grid.x, stream, p);
}

// On Hopper a head's columns are cut over as many blocks as keep the chip busy; elsewhere one block has all of them.
template <typename T>
cudaError_t launch_gated_delta(const GatedDeltaParams& params, cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  const bool fits = params.key_dim <= kDeltaDepth && params.value_dim <= kDeltaWidth && params.taps <= kDeltaTaps &&
                    params.key_dim % 4 == 0 && params.value_dim % 4 == 0;
  if (!fits) return cudaErrorNotSupported;
  GatedDeltaParams p = params;
  p.rows_at_once = delta_rows_at_once(p);
  if (chip.major < 9) return run_gated_delta<T, 512, 1>(p, chip, 1, stream);
  const bool few = static_cast<int64_t>(p.num_v_heads) * p.batch * 4 <= chip.sms;
  const int cluster = p.blocks_per_head > 0 ? std::min(std::max(p.blocks_per_head, 2), 8) : few ? 4 : 2;
  return run_gated_delta<T, 256, 2>(p, chip, cluster, stream);
}

}  // namespace trt_eagle3
