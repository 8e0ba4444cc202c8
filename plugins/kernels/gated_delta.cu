#include "gated_delta.cuh"

#include "gated_delta_commit.cuh"

namespace trt_eagle3 {

cudaError_t gated_delta(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.batch == 0 || params.num_new == 0) return cudaSuccess;
  return with_dtype(params.dtype, [&](auto t) { return launch_gated_delta<decltype(t)>(params, stream); });
}

cudaError_t commit_delta(const CommitDeltaParams& params, cudaStream_t stream) {
  return launch_commit_delta(params, stream);
}

cudaError_t commit_window(const CommitWindowParams& params, cudaStream_t stream) {
  return with_dtype(params.dtype, [&](auto t) { return launch_commit_window<decltype(t)>(params, stream); });
}

}  // namespace trt_eagle3
