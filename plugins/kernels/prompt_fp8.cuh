// TreeAttention's prompt kernel over an FP8 cache: a launch before it widens what the rows see into the workspace, a
// cache of T whose pages lie one after the other. Bytes are exact in T; their scales are the kernel's to apply.
//
// Moved beside what the kernel moves: 3 bytes for a number of the seen cache, out of L2 for the most part.
#pragma once

#include "fp8.cuh"
#include "prompt_tile.cuh"

namespace trt_eagle3 {

// In the workspace, after PromptWorkspace: page table [B, P], then keys and values [B * P * page_size, Hkv, D].
struct WidenedCache {
  int* page_table;
  void *keys, *values;

  static int64_t numbers(const TreeAttentionParams& p) {
    return static_cast<int64_t>(p.batch) * p.pages_per_row * p.page_size * p.num_kv_heads * p.head_dim;
  }
  static size_t table_bytes(const TreeAttentionParams& p) {
    return (static_cast<size_t>(p.batch) * p.pages_per_row * 4 + 127) / 128 * 128;
  }
  static size_t bytes(const TreeAttentionParams& p) { return table_bytes(p) + 4 * numbers(p) + 128; }
  explicit WidenedCache(const TreeAttentionParams& p, void* base) {
    char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + 127) / 128 * 128);
    page_table = reinterpret_cast<int*>(start);
    keys = start + table_bytes(p);
    values = static_cast<char*>(keys) + 2 * numbers(p);
  }
};

// grid (P, B): a page of a sequence, as far as it is seen.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) widen_cache_kernel(const TreeAttentionParams p, const WidenedCache wide) {
  wait_for_previous();
  const int sequence = blockIdx.y, index = sequence * p.pages_per_row + blockIdx.x;
  if (threadIdx.x == 0) wide.page_table[index] = index;
  const int first_new = p.past_lengths[sequence] + p.tail - p.num_new;
  const int end = first_new + min(p.query_lengths[sequence], p.num_new);
  const int rows = min(end - static_cast<int>(blockIdx.x) * p.page_size, p.page_size);
  if (rows <= 0) return;
  const int row_pieces = p.num_kv_heads * p.head_dim / 16;
  const int64_t page_pieces = static_cast<int64_t>(p.page_size) * row_pieces;
  const uint4* keys = static_cast<const uint4*>(p.k_cache) + p.page_table[index] * page_pieces;
  const uint4* values = static_cast<const uint4*>(p.v_cache) + p.page_table[index] * page_pieces;
  uint4* wide_keys = static_cast<uint4*>(wide.keys) + index * page_pieces * 2;
  uint4* wide_values = static_cast<uint4*>(wide.values) + index * page_pieces * 2;
#pragma unroll 2
  for (int i = threadIdx.x; i < rows * row_pieces; i += kThreads) {
    const uint4 key = keys[i], value = values[i];
    wide_keys[2 * i] = fp8_widened<T>(key.x, key.y);
    wide_keys[2 * i + 1] = fp8_widened<T>(key.z, key.w);
    wide_values[2 * i] = fp8_widened<T>(value.x, value.y);
    wide_values[2 * i + 1] = fp8_widened<T>(value.z, value.w);
  }
}

// Most that the widened cache may take of a device's memory; above it TreeAttention's other kernels read the bytes.
constexpr size_t kMaxWidenedBytes = size_t{512} << 20;

}  // namespace trt_eagle3
