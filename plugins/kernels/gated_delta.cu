#include "gated_delta.cuh"

#include "gated_delta_commit.cuh"
#include "gated_delta_prompt.cuh"

namespace trt_eagle3 {

cudaError_t gated_delta_workspace(const GatedDeltaParams& params, size_t* bytes) {
  Chip chip;
  const cudaError_t error = Chip::current(&chip);
  if (error == cudaSuccess) *bytes = DeltaPromptPlan(params, chip).bytes;
  return error;
}

cudaError_t gated_delta(const GatedDeltaParams& params, void* workspace, size_t, cudaStream_t stream) {
  if (params.batch == 0 || params.num_new == 0) return cudaSuccess;
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  return with_dtype(params.dtype, [&](auto t) {
    using T = decltype(t);
    const DeltaPromptPlan plan(params, chip);
    if constexpr (sizeof(T) == 2) {
      if (plan.takes) return launch_delta_prompt<T>(params, plan, workspace, stream);
    }
    return launch_gated_delta<T>(params, stream);
  });
}

cudaError_t commit_delta(const CommitDeltaParams& params, cudaStream_t stream) {
  return launch_commit_delta(params, stream);
}

cudaError_t commit_window(const CommitWindowParams& params, cudaStream_t stream) {
  return with_dtype(params.dtype, [&](auto t) { return launch_commit_window<decltype(t)>(params, stream); });
}

}  // namespace trt_eagle3
