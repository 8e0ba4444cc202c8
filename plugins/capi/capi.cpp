// The functions of the C library: one body for all kernels, and one for those with a workspace.
#include "arguments.h"

namespace trt_eagle3 {
namespace {

thread_local std::string last_error;

te3_status finish(const Check& check) {
  if (!check.ok()) last_error = check.message();
  return check.status();
}

// An argument struct begins with its tensors.
template <int num_tensors, typename Args>
void on_device(const Args& args, const void* workspace, Check* check) {
  static_assert(sizeof(Args) >= num_tensors * sizeof(te3_tensor));
  const auto* tensors = reinterpret_cast<const te3_tensor*>(&args);
  const void* pointers[num_tensors + 1] = {workspace};
  for (int i = 0; i < num_tensors; ++i) pointers[i + 1] = tensors[i].data;
  check->on_device(pointers, num_tensors + 1);
}

template <int num_tensors, typename Args, typename Params>
te3_status run(const char* op, Params (*params_of)(const Args&, Check*),
               cudaError_t (*launch)(const Params&, cudaStream_t), const Args* args, void* stream) {
  Check check(op);
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return finish(check);
  const Params params = params_of(*args, &check);
  on_device<num_tensors>(*args, nullptr, &check);
  if (check.ok()) check.launched(launch(params, static_cast<cudaStream_t>(stream)));
  return finish(check);
}

template <typename Args, typename Params>
te3_status workspace_of(const char* op, Params (*params_of)(const Args&, Check*),
                        cudaError_t (*size_of)(const Params&, size_t*), const Args* args, size_t* bytes) {
  Check check(op);
  check.that(args != nullptr && bytes != nullptr, "args and bytes must not be null");
  if (!check.ok()) return finish(check);
  const Params params = params_of(*args, &check);
  check.on_device(nullptr, 0);
  if (check.ok()) check.launched(size_of(params, bytes));
  return finish(check);
}

template <int num_tensors, typename Args, typename Params>
te3_status run(const char* op, Params (*params_of)(const Args&, Check*), cudaError_t (*size_of)(const Params&, size_t*),
               cudaError_t (*launch)(const Params&, void*, size_t, cudaStream_t), const Args* args, void* workspace,
               size_t workspace_bytes, void* stream) {
  Check check(op);
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return finish(check);
  const Params params = params_of(*args, &check);
  on_device<num_tensors>(*args, workspace, &check);
  size_t wanted = 0;
  if (check.ok()) check.launched(size_of(params, &wanted));
  check.workspace(workspace, workspace_bytes, wanted);
  if (check.ok()) {
    check.launched(launch(params, workspace, workspace_bytes, static_cast<cudaStream_t>(stream)));
  }
  return finish(check);
}

}  // namespace
}  // namespace trt_eagle3

int32_t te3_abi_version(void) { return TE3_ABI_VERSION; }

const char* te3_last_error(void) { return trt_eagle3::last_error.c_str(); }

#define TE3_DEFINE(op, Params, num_tensors)                                                          \
  te3_status te3_##op(const te3_##op##_args* args, void* stream) {                                   \
    return trt_eagle3::run<num_tensors>(#op, trt_eagle3::op##_params, trt_eagle3::op, args, stream); \
  }
TE3_KERNELS(TE3_DEFINE)

#define TE3_DEFINE_WITH_WORKSPACE(op, Params, num_tensors)                                                        \
  te3_status te3_##op##_workspace(const te3_##op##_args* args, size_t* bytes) {                                   \
    return trt_eagle3::workspace_of(#op "_workspace", trt_eagle3::op##_params, trt_eagle3::op##_workspace, args,  \
                                    bytes);                                                                       \
  }                                                                                                               \
  te3_status te3_##op(const te3_##op##_args* args, void* workspace, size_t workspace_bytes, void* stream) {       \
    return trt_eagle3::run<num_tensors>(#op, trt_eagle3::op##_params, trt_eagle3::op##_workspace, trt_eagle3::op, \
                                        args, workspace, workspace_bytes, stream);                                \
  }
TE3_KERNELS_WITH_WORKSPACE(TE3_DEFINE_WITH_WORKSPACE)
