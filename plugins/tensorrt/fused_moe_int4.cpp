// FusedMoeInt4: a mixture of experts whose weights are of four bits. Types: T of x, router_logits and y; the others are
// int32 that carry bytes, for each expert as LinearInt4's: eight codes, two scales of scale_type, four zero points.
#include "mixture.h"

namespace trt_eagle3 {
namespace {

enum { kScaleType = 3 };
enum { kGateUp = 2, kGateUpScale, kDown, kDownScale, kGateUpZeroPoint, kDownZeroPoint, kMostInputs };
constexpr int64_t kCodes = 8, kScales = 2, kZeroPoints = 4;  // in an int32
constexpr int64_t kSpan = 128;
constexpr int32_t kOnnxHalf = 10, kOnnxBFloat16 = 16;

// An input whose int32 hold `count` rows' numbers of `dtype`.
te3_tensor numbers_of(const Call& call, int32_t input, int32_t dtype, int64_t count) {
  te3_tensor numbers = input_of(call, input);
  numbers.dtype = dtype;
  numbers.shape[1] *= count;
  return numbers;
}

int64_t part(int64_t size, int64_t by) { return size == kUnknown ? kUnknown : size / by; }

class FusedMoeInt4 final : public Mixture {
 public:
  FusedMoeInt4()
      : Mixture("FusedMoeInt4", {{"scale_type", false, true}},
                {{"gate_up", 3},
                 {"gate_up_scale", 3},
                 {"down", 3},
                 {"down_scale", 3},
                 {"gate_up_zero_point", 3},
                 {"down_zero_point", 3}},
                {kDown, kCodes, kSpan, kSpan}) {}

  std::string refuse_values(const Values& v) const override {
    const int32_t type = v[kScaleType].integer;
    if (type != kOnnxHalf && type != kOnnxBFloat16) {
      return "scale_type: expected 10 (float16) or 16 (bfloat16), got " + std::to_string(type);
    }
    return Mixture::refuse_values(v);
  }

  std::string refuse_num_inputs(const Values&, int32_t count) const override {
    if (count == kGateUpZeroPoint || count == kMostInputs) return "";
    return "expected 6 inputs, or 8 with zero points, got " + std::to_string(count);
  }

  size_t workspace_bytes(const Values& v, size_t, const std::vector<Shape>& in, const DataType*) const override {
    return bytes_of(v, in, fused_moe_int4_workspace);
  }

  std::string launch(const Values& v, const Call& call) const override {
    const int32_t scale_type = v[kScaleType].integer == kOnnxHalf ? TE3_FLOAT16 : TE3_BFLOAT16;
    te3_fused_moe_int4_args args = {};
    args.gate_up = input_of(call, kGateUp);
    args.gate_up_scale = numbers_of(call, kGateUpScale, scale_type, kScales);
    args.down = input_of(call, kDown);
    args.down_scale = numbers_of(call, kDownScale, scale_type, kScales);
    if (call.num_inputs == kMostInputs) {
      args.gate_up_zero_point = numbers_of(call, kGateUpZeroPoint, TE3_UINT8, kZeroPoints);
      args.down_zero_point = numbers_of(call, kDownZeroPoint, TE3_UINT8, kZeroPoints);
    }
    return mix(v, call, args, fused_moe_int4_params, fused_moe_int4_workspace, fused_moe_int4);
  }

 private:
  DataType stored_type(int32_t, DataType) const override { return DataType::kINT32; }

  std::string refuse_scales(const std::vector<Shape>& in, int64_t hidden, int64_t width) const override {
    const int64_t groups = in[kGateUpScale].size[2];
    if (hidden != kUnknown && groups != kUnknown &&
        !(hidden == groups * 32 || hidden == groups * 64 || hidden == groups * 128)) {
      return "gate_up_scale: axis 2: expected one for each 32, 64 or 128 columns of H = " + std::to_string(hidden) +
             ", got " + std::to_string(groups);
    }
    const bool known = hidden != kUnknown && width != kUnknown && groups != kUnknown;
    const int64_t down_groups = known ? width / (hidden / groups) : kUnknown;
    const int64_t outer = width == kUnknown ? kUnknown : 2 * width;
    std::string reason;
    const auto expect = [&](int32_t input, int64_t rows, int64_t columns) {
      const char* tensor = inputs[input].name;
      const auto check = [&](int32_t axis, int64_t size, const char* meaning) {
        if (reason.empty()) reason = refuse_size(tensor, in[input], axis, size, meaning);
      };
      check(0, in[kGateUp].size[0], "E of gate_up");
      check(1, rows, "rows of its weight in int32");
      check(2, columns, "groups of its weight");
    };
    expect(kGateUpScale, part(outer, kScales), groups);
    expect(kDownScale, part(hidden, kScales), down_groups);
    if (in.size() < kMostInputs) return reason;
    expect(kGateUpZeroPoint, part(outer, kZeroPoints), groups);
    expect(kDownZeroPoint, part(hidden, kZeroPoints), down_groups);
    return reason;
  }
};

}  // namespace

const Description& fused_moe_int4_description() {
  static const FusedMoeInt4 description;
  return description;
}

}  // namespace trt_eagle3
