#include "tree_launch.cuh"
#include "tree_simple.cuh"

namespace trt_eagle3 {

template <>
cudaError_t run_tree_head_dim<64>(const TreeAttentionParams& p, const TreeRequest& request);
template <>
cudaError_t run_tree_head_dim<96>(const TreeAttentionParams& p, const TreeRequest& request);
template <>
cudaError_t run_tree_head_dim<128>(const TreeAttentionParams& p, const TreeRequest& request);
template <>
cudaError_t run_tree_head_dim<256>(const TreeAttentionParams& p, const TreeRequest& request);

template <>
cudaError_t run_tree_fp8_head_dim<64>(const TreeAttentionParams& p, const TreeRequest& request);
template <>
cudaError_t run_tree_fp8_head_dim<128>(const TreeAttentionParams& p, const TreeRequest& request);

namespace {

// Not supported: another head_dim, or a mask too large for shared memory.
cudaError_t run_fast(const TreeAttentionParams& p, const TreeRequest& request) {
  if (p.kv_scales != nullptr) {
    if (p.head_dim == 64) return run_tree_fp8_head_dim<64>(p, request);
    if (p.head_dim == 128) return run_tree_fp8_head_dim<128>(p, request);
    return cudaErrorNotSupported;
  }
  switch (p.head_dim) {
    case 64:
      return run_tree_head_dim<64>(p, request);
    case 96:
      return run_tree_head_dim<96>(p, request);
    case 128:
      return run_tree_head_dim<128>(p, request);
    case 256:
      return run_tree_head_dim<256>(p, request);
    default:
      return cudaErrorNotSupported;
  }
}

template <typename T, bool kFp8>
cudaError_t write_rows(const TreeAttentionParams& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (p.head_dim % 8 == 0) return tree_write<T, kFp8>(p, stream);
  }
  tree_write_simple_kernel<T, kFp8><<<p.batch * p.num_new, 128, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t dispatch(const TreeAttentionParams& p, const TreeRequest& request) {
  if (p.batch == 0 || p.num_new == 0) return cudaSuccess;
  if (p.write_only != 0) {
    if (request.bytes != nullptr) return cudaSuccess;
    return with_dtype(p.dtype, [&](auto t) {
      using T = decltype(t);
      return p.kv_scales != nullptr ? write_rows<T, true>(p, request.stream) : write_rows<T, false>(p, request.stream);
    });
  }
  if (p.path != AttentionPath::kSimple && p.dtype != DType::kFloat32) {
    const cudaError_t error = run_fast(p, request);
    if (error != cudaErrorNotSupported || p.path != AttentionPath::kAuto) return error;
  }
  if (p.path != AttentionPath::kAuto && p.path != AttentionPath::kSimple) return cudaErrorNotSupported;
  if (request.bytes != nullptr) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    return p.kv_scales != nullptr ? tree_simple<T, true>(p, request.stream) : tree_simple<T, false>(p, request.stream);
  });
}

}  // namespace

cudaError_t tree_attention_workspace(const TreeAttentionParams& params, size_t* bytes) {
  *bytes = 0;
  return dispatch(params, TreeRequest{bytes, nullptr, 0, nullptr});
}

cudaError_t tree_attention(const TreeAttentionParams& params, void* workspace, size_t workspace_bytes,
                           cudaStream_t stream) {
  return dispatch(params, TreeRequest{nullptr, workspace, workspace_bytes, stream});
}

}  // namespace trt_eagle3
