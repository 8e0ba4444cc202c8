// Launches TreeAttention for prompts, where it pays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chip.cuh"
#include "prompt_attention.cuh"
#include "prompt_fp8.cuh"
#include "tensor_map.cuh"

namespace trt_eagle3 {

// With `bytes`, says how much workspace a launch wants; without, launches.
struct TreeRequest {
  size_t* bytes;
  void* workspace;
  size_t workspace_bytes;
  cudaStream_t stream;
};

constexpr int kPromptRows = 256;  // new tokens of a sequence from which on it can pay

template <typename Tile>
int prompt_row_tiles(const TreeAttentionParams& p) {
  return ceil_div(p.num_new * (p.num_heads / p.num_kv_heads), Tile::Rows);
}

// Rows of a page that the copy engine takes at once; 0 where it cannot.
inline int prompt_box_rows(const TreeAttentionParams& p) {
  int rows = 128;
  while (rows >= 8 && p.page_size % rows != 0) rows /= 2;
  return rows >= 8 ? rows : 0;
}

// Where it has a unit of work for every multiprocessor: a unit is never split.
template <typename Tile>
bool prompt_pays(const TreeAttentionParams& p, const Chip& chip) {
  if (prompt_box_rows(p) == 0 || p.window > 0 || p.anchor_window > 0) return false;
  if (p.path == AttentionPath::kPrompt) return true;
  const int64_t units = static_cast<int64_t>(p.batch) * p.num_kv_heads * prompt_row_tiles<Tile>(p);
  return p.path == AttentionPath::kAuto && p.num_splits == 0 && p.num_new >= kPromptRows && units >= chip.sms;
}

template <typename Tile>
size_t prompt_workspace_bytes(const TreeAttentionParams& p) {
  const size_t rows = (PromptWorkspace::bytes(p) + 15) / 16 * 16;
  return rows + (Tile::Fp8 ? WidenedCache::bytes(p) : 0);
}

// Makes p's cache one of T, of what its rows see.
template <typename T>
cudaError_t widen_cache(TreeAttentionParams* p, const TreeRequest& request) {
  const size_t rows = (PromptWorkspace::bytes(*p) + 15) / 16 * 16;
  const WidenedCache wide(*p, static_cast<char*>(request.workspace) + rows);
  const cudaError_t error = launch(Overlap::kYes, widen_cache_kernel<T, 256>, dim3(p->pages_per_row, p->batch), 256, 0,
                                   1, request.stream, *p, wide);
  p->k_cache = wide.keys;
  p->v_cache = wide.values;
  p->page_table = wide.page_table;
  return error;
}

template <typename Tile>
cudaError_t run_prompt(TreeAttentionParams p, const Chip& chip, const TreeRequest& request) {
  const size_t wanted = prompt_workspace_bytes<Tile>(p);
  if (request.bytes != nullptr) {
    *request.bytes = wanted;
    return cudaSuccess;
  }
  if (wanted > request.workspace_bytes) return cudaErrorInvalidValue;
  const PromptWorkspace workspace(p, request.workspace);
  const int row_packs = p.num_kv_heads * p.head_dim / 8;
  constexpr int kWarps = 4;
  const auto write = prompt_write_kernel<typename Tile::T, Tile::Fp8, kWarps>;
  cudaError_t error = launch(Overlap::kYes, write, ceil_div(p.batch * p.num_new, kWarps), 32 * kWarps, 0, 1,
                             request.stream, p, workspace, row_packs);
  if (error != cudaSuccess) return error;
  if constexpr (Tile::Fp8) {
    if (error = widen_cache<typename Tile::T>(&p, request); error != cudaSuccess) return error;
  }
  PromptMaps maps;
  maps.box_rows = prompt_box_rows(p);
  for (int kind = 0; kind < 2; ++kind) {
    void* cache = kind == 0 ? p.k_cache : p.v_cache;
    const int columns = p.num_kv_heads * p.head_dim;  // of a slot; slots are in bounds: no test of them
    error = describe_rows(p.dtype, cache, INT32_MAX, columns, maps.box_rows, &maps.cache[kind]);
    if (error != cudaSuccess) return error;
  }
  const auto kernel = prompt_attention_kernel<Tile>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SharedBytes);
  if (error != cudaSuccess) return error;
  const int row_tiles = prompt_row_tiles<Tile>(p), units = p.batch * p.num_kv_heads * row_tiles;
  return launch(Overlap::kYes, kernel, std::min(units, chip.sms), Tile::Threads, Tile::SharedBytes, 1, request.stream,
                p, workspace, maps, units, row_tiles);
}

}  // namespace trt_eagle3
