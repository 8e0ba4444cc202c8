// Commit: states of recurrent layers brought further along the rows of a forward that were accepted, of all layers in
// one launch. commit_delta: matrices of the gated delta rule; commit_window: windows of the convolution before it.
//
// Idea: a warp has 8 columns of a matrix in registers and needs nobody else; where nothing was accepted nothing is read.
// Bytes moved: the states of who has rows, read and written once; their rows. Measured: nothing yet.
#pragma once

#include "gated_delta_state.cuh"

namespace trt_eagle3 {

constexpr int kCommitThreads = 128;

// grid (blocks of a head, Hv, layers * B); dynamic shared memory: k of a row, then u of each warp.
__global__ void __launch_bounds__(kCommitThreads) commit_delta_kernel(const CommitDeltaParams p) {
  __shared__ __align__(16) float keys[2][kDeltaDepth];
  __shared__ __align__(16) float updates[kCommitThreads / 32][kDeltaColumns];
  wait_for_previous();
  const int sequence = blockIdx.z % p.batch, layer = blockIdx.z / p.batch, head = blockIdx.y;
  const int* path = p.path + static_cast<int64_t>(sequence) * p.num_moves;
  if (path[0] < 0) return;
  const int lane = threadIdx.x % 32, number = lane / 2 % 4, warp = threadIdx.x / 32;
  const int column = (blockIdx.x * (kCommitThreads / 32) + warp) * kDeltaColumns;
  const int columns = p.value_dim - column;  // from this warp's first on; 0 or less where it has none
  const int key_head = head / (p.num_v_heads / p.num_k_heads);
  const int keys_width = p.num_k_heads * p.key_dim, values_width = p.num_v_heads * p.value_dim;
  const int64_t width = keys_width + values_width + 2 * p.num_v_heads;
  const int64_t entry = static_cast<int64_t>(layer) * p.num_entries + p.entries[sequence];
  const int64_t size = static_cast<int64_t>(p.key_dim) * p.value_dim;
  float* matrix = p.state + (entry * p.num_v_heads + head) * size + column;
  const float* rows = p.rows + (static_cast<int64_t>(layer) * p.batch + sequence) * p.num_rows * width;
  float* update = updates[warp];
  DeltaState state;
  state.load(matrix, p.key_dim, p.value_dim, columns);
#pragma unroll 1
  for (int i = 0; i < p.num_moves && path[i] >= 0; ++i) {
    const float* row = rows + path[i] * width;
    float* key = keys[i % 2];  // two: who is ahead writes the next one while others read
    for (int c = threadIdx.x; c < kDeltaDepth; c += kCommitThreads) {
      key[c] = c < p.key_dim ? row[key_head * p.key_dim + c] : 0.0f;
    }
    __syncthreads();
    const float* gates = row + keys_width + values_width + head;
    state.scale(expf(gates[0]));
    float sums[8] = {}, of_k[4] = {};
    state.multiply(key, of_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] = of_k[c];
    const float said = DeltaState::sum_of_eight(sums);
    const int own = DeltaState::column() + number;
    if (lane < 8) {
      const float v = own < columns ? row[keys_width + head * p.value_dim + column + own] : 0.0f;
      update[own] = gates[p.num_v_heads] * (v - said);
    }
    __syncwarp();
    state.add(key, update);
    __syncwarp();
  }
  state.store(matrix, p.key_dim, p.value_dim, columns);
}

// grid (blocks of channels, B, layers)
template <typename T>
__global__ void __launch_bounds__(kCommitThreads) commit_window_kernel(const CommitWindowParams p) {
  wait_for_previous();
  const int sequence = blockIdx.y, layer = blockIdx.z;
  const int channel = blockIdx.x * kCommitThreads + threadIdx.x;
  const int* path = p.path + static_cast<int64_t>(sequence) * p.num_moves;
  if (channel >= p.channels || path[0] < 0) return;
  const int64_t entry = static_cast<int64_t>(layer) * p.num_entries + p.entries[sequence];
  T* window = static_cast<T*>(p.state) + entry * p.width * p.channels + channel;
  const int64_t first = (static_cast<int64_t>(layer) * p.batch + sequence) * p.num_rows;
  const T* rows = static_cast<const T*>(p.rows) + first * p.channels + channel;
  int count = 0;
  while (count < p.num_moves && path[count] >= 0) ++count;
  // ascending: what is read lies behind what has been written
  for (int w = 0; w < p.width; ++w) {
    const int from = w + count;
    window[static_cast<int64_t>(w) * p.channels] = from < p.width
                                                       ? window[static_cast<int64_t>(from) * p.channels]
                                                       : rows[static_cast<int64_t>(path[from - p.width]) * p.channels];
  }
}

inline cudaError_t launch_commit_delta(const CommitDeltaParams& p, cudaStream_t stream) {
  const bool fits =
      p.key_dim <= kDeltaDepth && p.value_dim <= kDeltaWidth && p.key_dim % 4 == 0 && p.value_dim % 4 == 0;
  if (!fits) return cudaErrorNotSupported;
  if (p.num_layers == 0 || p.batch == 0 || p.num_moves == 0) return cudaSuccess;
  const dim3 grid(ceil_div(p.value_dim, kCommitThreads / 32 * kDeltaColumns), p.num_v_heads, p.num_layers * p.batch);
  return launch(Overlap::kYes, commit_delta_kernel, grid, kCommitThreads, 0, 1, stream, p);
}

template <typename T>
cudaError_t launch_commit_window(const CommitWindowParams& p, cudaStream_t stream) {
  if (p.num_layers == 0 || p.batch == 0 || p.num_moves == 0) return cudaSuccess;
  const dim3 grid(ceil_div(p.channels, kCommitThreads), p.batch, p.num_layers);
  return launch(Overlap::kYes, commit_window_kernel<T>, grid, kCommitThreads, 0, 1, stream, p);
}

}  // namespace trt_eagle3
