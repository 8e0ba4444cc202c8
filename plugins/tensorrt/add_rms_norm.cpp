// AddRmsNorm: y = RMSNorm(x [+ residual]) * (weight + weight_offset), sum = x + residual. Types: T of weight and y; x, and residual with
// sum, are T or float32; x is T beside a residual of 16 bits.
#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kEpsilon, kNumOutputs, kComputeType, kXType, kResidualType, kWeightOffset };
enum { kX, kWeight, kResidual };

class AddRmsNorm final : public Description {
 public:
  AddRmsNorm()
      : Description("AddRmsNorm",
                    {{"epsilon", true, true},
                     {"num_outputs", false, false},
                     {"compute_type", false, false},
                     {"x_type", false, false},
                     {"residual_type", false, false},
                     {"weight_offset", true, false}},
                    {{"x", 2}, {"weight", 1}, {"residual", 2}}, {{"y", 2}, {"sum", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    if (v[kNumOutputs].given && v[kNumOutputs].integer != 1 && v[kNumOutputs].integer != 2) {
      return "num_outputs: expected 1 (y) or 2 (y, sum), got " + std::to_string(v[kNumOutputs].integer);
    }
    for (const int i : {kComputeType, kXType, kResidualType}) {
      if (std::string reason = refuse_type(v[i], attributes[i].name); !reason.empty()) return reason;
    }
    if (num_outputs(v) == 1 && is_pinned(v[kResidualType])) return "residual_type: there is no residual (num_outputs)";
    return refuse_mixture(v);
  }

  int32_t num_outputs(const Values& v) const override { return v[kNumOutputs].given ? v[kNumOutputs].integer : 1; }

  std::string refuse_num_inputs(const Values& v, int32_t count) const override {
    const int32_t wanted = num_outputs(v) + 1;
    if (count == wanted) return "";
    return "expected " + std::to_string(wanted) + " inputs with num_outputs = " + std::to_string(num_outputs(v)) +
           ", got " + std::to_string(count);
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const override {
    const DataType type = types[position];
    if (position >= num_inputs) return type == (position == num_inputs ? types[kWeight] : types[kResidual]);
    const Value& own = v[position == kX ? kXType : position == kResidual ? kResidualType : kComputeType];
    const Value& pin = is_pinned(own) ? own : v[kComputeType];
    if (!accepts_type(pin, type)) return false;
    if (position == kWeight) return types[kX] == type || types[kX] == DataType::kFLOAT;
    if (position == kResidual) {
      return type == DataType::kFLOAT || (type == types[kWeight] && type == types[kX]);
    }
    return true;
  }

  DataType output_type(int32_t output, const DataType* in) const override {
    return in[output == 0 ? kWeight : kResidual];
  }

  std::string refuse_shapes(const Values&, const std::vector<Shape>& in) const override {
    const int64_t hidden = in[kX].size[1];
    std::string reason = refuse_size("weight", in[kWeight], 0, hidden, "H of x");
    if (reason.empty() && in.size() > kResidual) {
      reason = refuse_size("residual", in[kResidual], 1, hidden, "H of x");
      if (reason.empty()) reason = refuse_size("residual", in[kResidual], 0, in[kX].size[0], "n of x");
    }
    return reason;
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder&) const override {
    return in[kX];
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_add_rms_norm_args args = {};
    args.x = input_of(call, kX);
    args.weight = input_of(call, kWeight);
    args.y = output_of(call, 0);
    if (call.num_inputs > kResidual) {
      args.residual = input_of(call, kResidual);
      args.sum = output_of(call, 1);
    }
    args.epsilon = v[kEpsilon].real;
    args.weight_offset = v[kWeightOffset].real;
    Check check(name);
    const AddRmsNormParams params = add_rms_norm_params(args, &check);
    if (check.ok()) check.launched(add_rms_norm(params, call.stream));
    return check.message();
  }

 private:
  // Types that are written down but that no kernel mixes.
  static std::string refuse_mixture(const Values& v) {
    const auto is_float32 = [](const Value& type) { return pinned_type(type) == DataType::kFLOAT; };
    if (!is_pinned(v[kComputeType])) return "";
    const DataType compute = pinned_type(v[kComputeType]);
    const Value& x = is_pinned(v[kXType]) ? v[kXType] : v[kComputeType];
    const Value& residual = is_pinned(v[kResidualType]) ? v[kResidualType] : v[kComputeType];
    if (pinned_type(x) != compute && !is_float32(x)) return "x_type: expected compute_type or 1 (float32)";
    if (v[kNumOutputs].integer != 2) return "";
    if (pinned_type(residual) != compute && !is_float32(residual)) {
      return "residual_type: expected compute_type or 1 (float32)";
    }
    if (pinned_type(x) != compute && !is_float32(residual)) return "x_type: float32 beside a 16-bit residual";
    return "";
  }
};

}  // namespace

const Description& add_rms_norm_description() {
  static const AddRmsNorm description;
  return description;
}

}  // namespace trt_eagle3
