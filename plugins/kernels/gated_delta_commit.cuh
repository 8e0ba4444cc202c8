// Commit: states of recurrent layers brought further along the rows of a forward that were accepted, of all layers in
// one launch. commit_delta: matrices of the gated delta rule; commit_window: windows of the convolution before it.
//
// Idea: a block has 32 columns of a matrix in registers, of which every move is of whole lines of memory; all that its
// rows need is read while the state is under way. Where nothing was accepted nothing is read.
// Bytes moved: the states of who has rows, read and written once; k and v of their rows. Measured:
// docs/measurements.md, "Qwen3.5 on CUDA".
#pragma once

#include "gated_delta_state.cuh"

namespace trt_eagle3 {

constexpr int kCommitThreads = 32 * kDeltaParts;
constexpr int kCommitRows = kDeltaParts;  // that are read at once, k by all, the rest by a warp each
constexpr int kCommitWindow = kDeltaTaps - 1;

// k, v, g and beta of some rows; products of k and the state of two rows by turns.
struct CommitShared {
  float keys[kCommitRows][kDeltaDepth], values[kCommitRows][kDeltaGroup], gates[kCommitRows], betas[kCommitRows];
  float parts[2][kDeltaParts][kDeltaGroup];
};

// Which columns of which matrix a block brings further: grid (blocks of a head, Hv, layers * B).
struct CommitBlock {
  const CommitDeltaParams& p;
  CommitShared& s;
  int head, column, columns;  // first column, and how many there are from it on
  const int32_t* path;
  const float* rows;

  // The rows that follow move `start`, at most kCommitRows; -> how many there are. A barrier follows.
  __device__ __forceinline__ int read(int start) const {
    const int thread = threadIdx.x, keys = p.num_k_heads * p.key_dim, values = p.num_v_heads * p.value_dim;
    const int64_t width = keys + values + 2 * p.num_v_heads;
    const int key = head / (p.num_v_heads / p.num_k_heads) * p.key_dim + thread;
    float found[kCommitRows];
    int moves[kCommitRows], count = 0;
#pragma unroll
    for (int r = 0; r < kCommitRows; ++r) moves[r] = start + r < p.num_moves ? path[start + r] : -1;
#pragma unroll
    for (int r = 0; r < kCommitRows; ++r) {
      if (moves[r] >= 0) count = r + 1;
      found[r] = moves[r] >= 0 && thread < p.key_dim ? rows[moves[r] * width + key] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kCommitRows; ++r) s.keys[r][thread] = found[r];
    const int own = thread / 32, lane = thread % 32, move = start + own < p.num_moves ? path[start + own] : -1;
    if (move < 0) return count;
    const float* row = rows + move * width + keys;
    s.values[own][lane] = lane < columns ? row[head * p.value_dim + column + lane] : 0.0f;
    if (lane == 0) s.gates[own] = row[values + head];
    if (lane == 1) s.betas[own] = row[values + p.num_v_heads + head];
    return count;
  }

  // One row further.
  __device__ __forceinline__ void step(DeltaState& state, int r) const {
    const int lane = threadIdx.x % 32;
    float sums[4] = {};
    state.scale(expf(s.gates[r]));
    state.multiply(s.keys[r], sums);
    DeltaState::share(sums);
    auto& parts = s.parts[r % 2];  // two: who is ahead writes the next one while others read
    parts[DeltaState::part()][DeltaState::column() + lane / 8 % 2 * 2 + lane / 16] = sums[0];
    __syncthreads();
    float update[4];
    load4(s.values[r] + DeltaState::column(), update);
#pragma unroll
    for (int part = 0; part < kDeltaParts; ++part) {
      float said[4];
      load4(parts[part] + DeltaState::column(), said);
#pragma unroll
      for (int c = 0; c < 4; ++c) update[c] -= said[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) update[c] *= s.betas[r];
    state.add(s.keys[r], update);
  }
};

__global__ void __launch_bounds__(kCommitThreads, 5) commit_delta_kernel(const CommitDeltaParams p) {
  __shared__ __align__(16) CommitShared shared;
  wait_for_previous();
  const int sequence = blockIdx.z % p.batch, layer = blockIdx.z / p.batch, column = blockIdx.x * kDeltaGroup;
  const int columns = p.value_dim - column, head = blockIdx.y;
  const int32_t* path = p.path + static_cast<int64_t>(sequence) * p.num_moves;
  const int64_t entry = static_cast<int64_t>(layer) * p.num_entries + p.entries[sequence];
  if (path[0] < 0) return;
  const int64_t width = p.num_k_heads * p.key_dim + p.num_v_heads * (p.value_dim + 2);
  const float* rows = p.rows + (static_cast<int64_t>(layer) * p.batch + sequence) * p.num_rows * width;
  const CommitBlock block{p, shared, head, column, columns, path, rows};
  float* matrix = p.state + (entry * p.num_v_heads + head) * p.key_dim * p.value_dim + column;
  DeltaState state;
  state.load(matrix, p.key_dim, p.value_dim, columns);
  for (int start = 0, count = kCommitRows; start < p.num_moves && count == kCommitRows; start += kCommitRows) {
    count = block.read(start);
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < count; ++r) block.step(state, r);
    __syncthreads();
  }
  state.store(matrix, p.key_dim, p.value_dim, columns);
}

// E: what is moved at once; grid (blocks of channels, B, layers)
template <typename E>
__global__ void __launch_bounds__(kCommitThreads) commit_window_kernel(const CommitWindowParams p) {
  wait_for_previous();
  const int sequence = blockIdx.y, layer = blockIdx.z;
  const int channel = blockIdx.x * kCommitThreads + threadIdx.x;
  const int32_t* path = p.path + static_cast<int64_t>(sequence) * p.num_moves;
  const int64_t entry = static_cast<int64_t>(layer) * p.num_entries + p.entries[sequence];
  if (channel >= p.channels || path[0] < 0) return;
  E* window = static_cast<E*>(p.state) + entry * p.width * p.channels + channel;
  const int64_t first = (static_cast<int64_t>(layer) * p.batch + sequence) * p.num_rows;
  const E* rows = static_cast<const E*>(p.rows) + first * p.channels + channel;
  int count = 0;
  while (count < p.num_moves && path[count] >= 0) ++count;
  for (int begin = 0; begin < p.width; begin += kCommitWindow) {
    E moved[kCommitWindow];
    // ascending: what is read lies behind what has been written
#pragma unroll
    for (int w = 0; w < kCommitWindow; ++w) {
      const int from = begin + w + count;
      if (begin + w >= p.width) continue;
      moved[w] = from < p.width ? window[static_cast<int64_t>(from) * p.channels]
                                : rows[static_cast<int64_t>(path[from - p.width]) * p.channels];
    }
#pragma unroll
    for (int w = 0; w < kCommitWindow; ++w) {
      if (begin + w < p.width) window[static_cast<int64_t>(begin + w) * p.channels] = moved[w];
    }
  }
}

inline cudaError_t launch_commit_delta(const CommitDeltaParams& p, cudaStream_t stream) {
  const bool fits =
      p.key_dim <= kDeltaDepth && p.value_dim <= kDeltaWidth && p.key_dim % 4 == 0 && p.value_dim % 4 == 0;
  if (!fits) return cudaErrorNotSupported;
  if (p.num_layers == 0 || p.batch == 0 || p.num_moves == 0) return cudaSuccess;
  const dim3 grid(ceil_div(p.value_dim, kDeltaGroup), p.num_v_heads, p.num_layers * p.batch);
  return launch(Overlap::kYes, commit_delta_kernel, grid, kCommitThreads, 0, 1, stream, p);
}

template <typename E>
cudaError_t run_commit_window(const CommitWindowParams& p, cudaStream_t stream) {
  const dim3 grid(ceil_div(p.channels, kCommitThreads), p.batch, p.num_layers);
  return launch(Overlap::kYes, commit_window_kernel<E>, grid, kCommitThreads, 0, 1, stream, p);
}

// Four channels at once where they are a multiple of it.
template <typename T>
cudaError_t launch_commit_window(const CommitWindowParams& params, cudaStream_t stream) {
  if (params.num_layers == 0 || params.batch == 0 || params.num_moves == 0) return cudaSuccess;
  if (params.channels % 4 != 0) return run_commit_window<T>(params, stream);
  CommitWindowParams p = params;
  p.channels /= 4;
  return run_commit_window<Pack<T, 4>>(p, stream);
}

}  // namespace trt_eagle3
