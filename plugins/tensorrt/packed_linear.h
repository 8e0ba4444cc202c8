// What LinearFp8, LinearInt8 and LinearInt4 share: y = x . weight^T with a quantised weight that stays as it is in the
// engine.
//
// A few rows go through our kernels, which read the quantised numbers. For more, as of prompts, the weight is
// dequantised into the workspace and multiplied by cuBLAS, which sums in float32. Constants carry bytes: codes lie in
// int32, as 8.6 has neither FP8 nor four bits.
#pragma once

#include "cublas.h"
#include "tensors.h"

namespace trt_eagle3 {

class PackedLinear : public Description {
 public:
  using Description::Description;

  std::string refuse_values(const Values& v) const override;
  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const override;
  DataType output_type(int32_t, const DataType* in) const override { return in[kX]; }
  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder&) const override;
  void prepare() const override { make_cublas_handle(); }
  size_t make_scratch_bytes(const Values&) const override { return cublas_workspace_bytes(); }
  size_t workspace_bytes(const Values&, size_t scratch_bytes, const std::vector<Shape>& in,
                         const DataType*) const override;

 protected:
  enum { kComputeType };
  enum { kX, kWeight, kScale, kZeroPoint };

  // `size` / `by`, where it is known.
  static int64_t part(int64_t size, int64_t by) { return size == kUnknown ? kUnknown : size / by; }

  // Type of a constant input.
  virtual DataType stored_type(int32_t position) const = 0;

  // What a launch does with the kernels of one format, whose arguments are `args`.
  template <typename Args, typename Params, typename UnpackArgs, typename UnpackParams>
  std::string multiply(const Call& call, const Args& args, Params (*params_of)(const Args&, Check*),
                       cudaError_t (*linear)(const Params&, cudaStream_t), UnpackArgs unpack_args,
                       UnpackParams (*unpack_params_of)(const UnpackArgs&, Check*),
                       cudaError_t (*unpack)(const UnpackParams&, cudaStream_t)) const {
    Check check(name);
    const Params params = params_of(args, &check);
    if (!check.ok()) return check.message();
    const cudaError_t error = linear(params, call.stream);
    if (error != cudaErrorNotSupported) {
      check.launched(error);
      return check.message();
    }
    if (call.workspace == nullptr) return std::string(name) + ": TensorRT gave no workspace";
    unpack_args.out = args.x;
    unpack_args.out.data = static_cast<char*>(call.workspace) + unpacked_offset(call.scratch_bytes);
    unpack_args.out.shape[0] = params.outer;
    const UnpackParams unpack_params = unpack_params_of(unpack_args, &check);
    if (check.ok()) check.launched(unpack(unpack_params, call.stream));
    if (!check.ok()) return check.message();
    const LinearParams dense = {params.x,     unpack_params.out, params.y,     params.num_rows,
                                params.inner, params.outer,      params.dtype, 0};
    const std::string reason = cublas_linear(dense, call.workspace, call.scratch_bytes, call.stream);
    return reason.empty() ? "" : std::string(name) + ": " + reason;
  }

 private:
  // Where the dequantised weight lies in the workspace: after what cuBLAS takes.
  static size_t unpacked_offset(size_t scratch_bytes) { return (scratch_bytes + 255) / 256 * 256; }
};

}  // namespace trt_eagle3
