// GatedDelta by tensor cores: prompts, and trees of more than a few rows, of 16-bit types. By passes over some chunks:
// gated_delta_chunk.cuh, gated_delta_walk.cuh; then the gated norm of all rows.
#pragma once

#include <algorithm>

#include "chip.cuh"
#include "gated_delta_chunk.cuh"
#include "gated_delta_walk.cuh"

namespace trt_eagle3 {

constexpr int kDeltaNormHeads = 4;  // of a warp

// RMSNorm of o, rounded to T, by heads, times silu(z); in place. A warp has kDeltaNormHeads heads of rows.
template <typename T>
__global__ void __launch_bounds__(kDeltaMmaThreads) delta_norm_kernel(const GatedDeltaParams p) {
  wait_for_previous();
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kDeltaMmaThreads + threadIdx.x) / 32;
  const int64_t total = static_cast<int64_t>(p.batch) * p.num_new * p.num_v_heads;
  const int column = threadIdx.x % 32 * 4, values = p.num_v_heads * p.value_dim;
  const bool there = column < p.value_dim;
  float o[kDeltaNormHeads][4] = {}, z[kDeltaNormHeads][4] = {}, weight[4] = {};
  if (there) load4(static_cast<const T*>(p.norm) + column, weight);
#pragma unroll
  for (int i = 0; i < kDeltaNormHeads; ++i) {
    const int64_t place = warp * kDeltaNormHeads + i, row = place / p.num_v_heads;
    if (!there || place >= total) continue;
    const int own = static_cast<int>(place % p.num_v_heads) * p.value_dim + column;
    load4(static_cast<const T*>(p.out) + row * values + own, o[i]);
    load4(static_cast<const T*>(p.qkvz) + row * (p.channels + values) + p.channels + own, z[i]);
  }
#pragma unroll
  for (int i = 0; i < kDeltaNormHeads; ++i) {
    const int64_t place = warp * kDeltaNormHeads + i;
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) squares += o[i][e] * o[i][e];
    const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(p.value_dim) + p.epsilon);
    if (!there || place >= total) continue;
    float gated[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) gated[e] = rounded<T>(weight[e] * rounded<T>(o[i][e] * scale)) * silu<T>(z[i][e]);
    store4(static_cast<T*>(p.out) + place * p.value_dim + column, gated);
  }
}

// Whether a launch goes this way, and in which portions.
struct DeltaPromptPlan {
  bool takes;
  int chunks, pass_chunks;  // of a sequence
  size_t bytes;             // of workspace: the same on any chip, and no more for less of anything

  DeltaPromptPlan(const GatedDeltaParams& p, const Chip& chip)
      : takes(p.dtype != DType::kFloat32 && p.num_new > kDeltaStepRows && p.blocks_per_head == 0 && p.chunk_rows == 0 &&
              p.key_dim <= kDeltaDepth && p.value_dim <= kDeltaWidth && p.taps <= kDeltaTaps && p.key_dim % 4 == 0 &&
              p.value_dim % 4 == 0),
        chunks(ceil_div(p.num_new, kDeltaChunkRows)),
        pass_chunks(std::min(chunks, std::max(kDeltaPassChunks / std::max(p.batch, 1), 1))),
        bytes(0) {
    const int64_t units = std::min<int64_t>(int64_t{p.batch} * chunks, std::max(kDeltaPassChunks, p.batch));
    if (takes) bytes = DeltaFragments::bytes(p, units, chunks > 1 ? p.batch : 0);
    takes = takes && shared_bytes(p.taps) <= chip.shared_bytes;
  }

  static int shared_bytes(int taps) {
    return std::max(DeltaChunkShared<uint16_t>::bytes(taps), DeltaWalkShared<uint16_t>::bytes());
  }
};

template <typename T>
cudaError_t launch_delta_prompt(const GatedDeltaParams& p, const DeltaPromptPlan& plan, void* workspace,
                                cudaStream_t stream) {
  const auto chunks = delta_chunk_kernel<T>;
  const auto walk = delta_walk_kernel<T>;
  const int chunk_bytes = DeltaChunkShared<T>::bytes(p.taps), walk_bytes = DeltaWalkShared<T>::bytes();
  const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t error = cudaFuncSetAttribute(chunks, limit, chunk_bytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(walk, limit, walk_bytes);
  DeltaPass pass = {p, DeltaFragments(workspace, p, int64_t{p.batch} * plan.pass_chunks), 0, 0};
  const dim3 slices(ceil_div(p.value_dim, kDeltaSlice), p.num_v_heads, p.batch);
  for (int first = 0; first < plan.chunks && error == cudaSuccess; first += plan.pass_chunks) {
    pass.first_chunk = first;
    pass.num_chunks = std::min(plan.pass_chunks, plan.chunks - first);
    const dim3 grid(pass.num_chunks, p.num_k_heads, p.batch);
    error = launch(Overlap::kYes, chunks, grid, kDeltaMmaThreads, chunk_bytes, 1, stream, pass);
    if (error == cudaSuccess) {
      error = launch(Overlap::kYes, walk, slices, kDeltaMmaThreads, walk_bytes, 1, stream, pass);
    }
  }
  if (error != cudaSuccess) return error;
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_new * p.num_v_heads;
  const int64_t each = kDeltaMmaThreads / 32 * kDeltaNormHeads;
  const dim3 grid(static_cast<unsigned>((heads + each - 1) / each));
  return launch(Overlap::kYes, delta_norm_kernel<T>, grid, kDeltaMmaThreads, 0, 1, stream, p);
}

}  // namespace trt_eagle3
