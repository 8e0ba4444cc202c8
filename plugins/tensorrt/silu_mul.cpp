// SiluMul: out = silu(gate) * up, both side by side in one input. Types: T of both tensors.
#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kComputeType };
enum { kGateUp };

class SiluMul final : public Description {
 public:
  SiluMul() : Description("SiluMul", {{"compute_type", false, false}}, {{"gate_up", 2}}, {{"out", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    return refuse_type(v[kComputeType], attributes[kComputeType].name);
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t) const override {
    const DataType type = types[position];
    if (position != kGateUp) return type == types[kGateUp];
    return accepts_type(v[kComputeType], type);
  }

  DataType output_type(int32_t, const DataType* in) const override { return in[kGateUp]; }

  std::string refuse_shapes(const Values&, const std::vector<Shape>& in) const override {
    const int64_t both = in[kGateUp].size[1];
    if (both == kUnknown || both % 2 == 0) return "";
    return "gate_up: axis 1: expected an even width, got " + std::to_string(both);
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder& builder) const override {
    nvinfer1::DimsExprs out = in[kGateUp];
    out.d[1] = builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *out.d[1], *builder.constant(2));
    return out;
  }

  std::string launch(const Values&, const Call& call) const override {
    te3_silu_mul_args args = {};
    args.gate_up = input_of(call, kGateUp);
    args.out = output_of(call, 0);
    Check check(name);
    const SiluMulParams params = silu_mul_params(args, &check);
    if (check.ok()) check.launched(silu_mul(params, call.stream));
    return check.message();
  }
};

}  // namespace

const Description& silu_mul_description() {
  static const SiluMul description;
  return description;
}

}  // namespace trt_eagle3
