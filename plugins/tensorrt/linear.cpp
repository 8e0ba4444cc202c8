// Linear: y = x . weight^T. Types: T of all three. A few rows go through our kernels, which read the weight once at the
// memory's speed; what they do not take (prompts, float32, small weights of many rows) through cuBLAS.
#include "cublas.h"
#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kComputeType };
enum { kX, kWeight };

class Linear final : public Description {
 public:
  Linear() : Description("Linear", {{"compute_type", false, false}}, {{"x", 2}, {"weight", 2}}, {{"y", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    return refuse_type(v[kComputeType], attributes[kComputeType].name);
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t) const override {
    const DataType type = types[position];
    if (position != kX) return type == types[kX];
    return accepts_type(v[kComputeType], type);
  }

  DataType output_type(int32_t, const DataType* in) const override { return in[kX]; }

  std::string refuse_shapes(const Values&, const std::vector<Shape>& in) const override {
    return refuse_size("weight", in[kWeight], 1, in[kX].size[1], "K of x");
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder&) const override {
    nvinfer1::DimsExprs out = in[kX];
    out.d[1] = in[kWeight].d[0];
    return out;
  }

  void prepare() const override { make_cublas_handle(); }
  size_t make_scratch_bytes(const Values&) const override { return cublas_workspace_bytes(); }

  std::string launch(const Values&, const Call& call) const override {
    te3_linear_args args = {};
    args.x = input_of(call, kX);
    args.weight = input_of(call, kWeight);
    args.y = output_of(call, 0);
    // An engine's weights are there before anything of it runs; a builder may fill its inputs just before a launch.
    args.prefetch_safe = call.building ? 0 : 1;
    Check check(name);
    const LinearParams params = linear_params(args, &check);
    if (!check.ok()) return check.message();
    const cudaError_t error = linear(params, call.stream);
    if (error != cudaErrorNotSupported) {
      check.launched(error);
      return check.message();
    }
    if (call.workspace == nullptr && call.scratch_bytes > 0) return "Linear: TensorRT gave no workspace";
    const std::string reason = cublas_linear(params, call.workspace, call.scratch_bytes, call.stream);
    return reason.empty() ? "" : "Linear: " + reason;
  }
};

}  // namespace

const Description& linear_description() {
  static const Linear description;
  return description;
}

}  // namespace trt_eagle3
