// What prompts need of a mixture of experts beside stock grouped products: route_rows, gather_rows, combine_rows.
//
// Idea: rows are counted by expert in chunks of 64, so that no launch waits for another's sums and nothing is sorted:
// where a row goes is the sum of what chunks before its own have for its expert. Bytes moved: the logits; x, and k
// copies of it written; k parts of each row read, and y written. Measured: docs/measurements.md, "Mixture of experts".
#include <algorithm>

#include "moe_task.cuh"

namespace trt_eagle3 {
namespace {

constexpr int kChunk = 64;
constexpr int kRouteThreads = 1024, kGatherThreads = 256, kCombineThreads = 256;
constexpr int kGatherBlocks = 264, kMostParts = kChunk * 32 / kGatherThreads;  // about; of a chunk: a warp for each row

// A block per chunk, a warp per row.
template <typename T>
__global__ void __launch_bounds__(kRouteThreads) route_rows_kernel(const RouteRowsParams p) {
  __shared__ int counts[kMoeMaxExperts];
  wait_for_previous();
  for (int e = threadIdx.x; e < p.num_experts; e += kRouteThreads) counts[e] = 0;
  __syncthreads();
  const int first = blockIdx.x * kChunk;
#pragma unroll 1
  for (int row = first + threadIdx.x / 32; row < min(first + kChunk, p.num_rows); row += kRouteThreads / 32) {
    const T* logits = static_cast<const T*>(p.router_logits) + int64_t{row} * p.num_experts;
    choose_experts<T, true>(logits, p.num_experts, p.top_k, p.renormalise != 0,
                            [&](int rank, int expert, float share) {
                              const int64_t slot = int64_t{row} * p.top_k + rank;
                              p.experts[slot] = expert;
                              p.shares[slot] = share;
                              p.places[slot] = atomicAdd(counts + expert, 1);
                            });
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_experts; e += kRouteThreads) {
    p.counts[static_cast<int64_t>(blockIdx.x) * p.num_experts + e] = counts[e];
  }
}

// grid (parts of a chunk's rows, chunks)
__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(const GatherRowsParams p) {
  __shared__ int begins[kMoeMaxExperts];  // of this chunk's rows of each expert
  __shared__ int totals[kMoeMaxExperts];
  wait_for_previous();
  const int chunks = gridDim.y, chunk = blockIdx.y;
  for (int e = threadIdx.x; e < p.num_experts; e += kGatherThreads) {
    int before = 0, all = 0;
#pragma unroll 4
    for (int c = 0; c < chunks; ++c) {
      const int count = p.counts[static_cast<int64_t>(c) * p.num_experts + e];
      before += c < chunk ? count : 0;
      all += count;
    }
    begins[e] = before;
    totals[e] = all;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, each = ceil_div(p.num_experts, 32);
    const int begin = min(lane * each, p.num_experts), end = min(begin + each, p.num_experts);
    int own = 0;
    for (int e = begin; e < end; ++e) own += totals[e];
    int place = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, place, offset);
      place += lane >= offset ? other : 0;
    }
    place -= own;
    for (int e = begin; e < end; ++e) {
      begins[e] += place;
      place += totals[e];
      if (blockIdx.x == 0 && chunk == 0) p.ends[e] = place;
    }
  }
  __syncthreads();
  const int first = chunk * kChunk, rows = min(kChunk, p.num_rows - first);
  const int warps = kGatherThreads / 32 * gridDim.x, warp = blockIdx.x * (kGatherThreads / 32) + threadIdx.x / 32;
  const int packs = p.hidden / 8, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = first + warp; row < first + rows; row += warps) {
    const int64_t slot = int64_t{row} * p.top_k;
    int position = 0;
    if (lane < p.top_k) {
      position = begins[p.experts[slot + lane]] + p.places[slot + lane];
      p.positions[slot + lane] = position;
    }
    const uint4* source = static_cast<const uint4*>(p.x) + int64_t{row} * packs;
    uint4* target = static_cast<uint4*>(p.gathered);
#pragma unroll 1
    for (int i = 0; i < packs; i += 32) {
      const bool there = i + lane < packs;
      const uint4 value = there ? source[i + lane] : uint4{};
#pragma unroll 1
      for (int rank = 0; rank < p.top_k; ++rank) {
        const int64_t to = __shfl_sync(0xFFFFFFFFu, position, rank);
        if (there) target[to * packs + i + lane] = value;
      }
    }
  }
}

// grid (rows, packs of 8 columns / threads)
template <typename T>
__global__ void __launch_bounds__(kCombineThreads) combine_rows_kernel(const CombineRowsParams p) {
  wait_for_previous();
  const int pack = blockIdx.y * kCombineThreads + threadIdx.x, packs = p.hidden / 8;
  if (pack >= packs) return;
  const int64_t row = blockIdx.x;
  const auto* parts = static_cast<const Pack<T, 8>*>(p.parts);
  float sums[8] = {};
#pragma unroll 4
  for (int rank = 0; rank < p.top_k; ++rank) {
    const int64_t slot = row * p.top_k + rank;
    const Pack<T, 8> values = parts[static_cast<int64_t>(p.positions[slot]) * packs + pack];
    const float share = p.shares[slot];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += share * to_float(values.values[i]);
  }
  Pack<T, 8> y;
#pragma unroll
  for (int i = 0; i < 8; ++i) y.values[i] = from_float<T>(sums[i]);
  static_cast<Pack<T, 8>*>(p.y)[row * packs + pack] = y;
}

}  // namespace

cudaError_t route_rows(const RouteRowsParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto t) {
    return launch(Overlap::kYes, route_rows_kernel<decltype(t)>, dim3(ceil_div(p.num_rows, kChunk)), kRouteThreads, 0,
                  1, stream, p);
  });
}

cudaError_t gather_rows(const GatherRowsParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0) {
    return cudaMemsetAsync(p.ends, 0, sizeof(int32_t) * p.num_experts, stream);
  }
  const int chunks = ceil_div(p.num_rows, kChunk), parts = std::min(kMostParts, std::max(2, kGatherBlocks / chunks));
  return launch(Overlap::kYes, gather_rows_kernel, dim3(parts, chunks), kGatherThreads, 0, 1, stream, p);
}

cudaError_t combine_rows(const CombineRowsParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0) return cudaSuccess;
  const dim3 grid(p.num_rows, ceil_div(p.hidden / 8, kCombineThreads));
  if (p.dtype == DType::kFloat16) {
    return launch(Overlap::kYes, combine_rows_kernel<__half>, grid, kCombineThreads, 0, 1, stream, p);
  }
  return launch(Overlap::kYes, combine_rows_kernel<__nv_bfloat16>, grid, kCombineThreads, 0, 1, stream, p);
}

}  // namespace trt_eagle3
