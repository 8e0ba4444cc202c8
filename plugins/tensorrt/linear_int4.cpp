// LinearInt4: y = x . ((weight - zero_point) * scale)^T. Types: T of x and y; the others are int32 that carry bytes:
// weight eight codes of four bits in the order of kernels/packed_weight.cuh, scale two numbers of scale_type (rows 2n
// and 2n + 1 of [N, K / group] lie in row n), zero_point four of eight bits (rows 4n to 4n + 3 likewise).
#include "packed_linear.h"

namespace trt_eagle3 {
namespace {

enum { kScaleType = 1 };
constexpr int64_t kCodes = 8, kScales = 2, kZeroPoints = 4;  // in an int32
constexpr int32_t kOnnxHalf = 10, kOnnxBFloat16 = 16;

class LinearInt4 final : public PackedLinear {
 public:
  LinearInt4()
      : PackedLinear("LinearInt4", {{"compute_type", false, false}, {"scale_type", false, true}},
                     {{"x", 2}, {"weight", 2}, {"scale", 2}, {"zero_point", 2}}, {{"y", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    const int32_t type = v[kScaleType].integer;
    if (type != kOnnxHalf && type != kOnnxBFloat16) {
      return "scale_type: expected 10 (float16) or 16 (bfloat16), got " + std::to_string(type);
    }
    return PackedLinear::refuse_values(v);
  }

  std::string refuse_num_inputs(const Values&, int32_t count) const override {
    if (count == kZeroPoint || count == kZeroPoint + 1) return "";
    return "expected 3 inputs, or 4 with zero_point, got " + std::to_string(count);
  }

  std::string refuse_shapes(const Values&, const std::vector<Shape>& in) const override {
    const int64_t inner = in[kX].size[1], outer = in[kWeight].size[0], groups = in[kScale].size[1];
    std::string reason = refuse_size("weight", in[kWeight], 1, part(inner, kCodes), "K of x / 8");
    if (reason.empty()) reason = refuse_size("scale", in[kScale], 0, part(outer, kScales), "N / 2");
    if (reason.empty() && inner != kUnknown && groups != kUnknown &&
        !(inner == groups * 32 || inner == groups * 64 || inner == groups * 128)) {
      reason = "scale: axis 1: expected one for each 32, 64 or 128 columns of K = " + std::to_string(inner) + ", got " +
               std::to_string(groups);
    }
    if (!reason.empty() || in.size() == kZeroPoint) return reason;
    reason = refuse_size("zero_point", in[kZeroPoint], 0, part(outer, kZeroPoints), "N / 4");
    return reason.empty() ? refuse_size("zero_point", in[kZeroPoint], 1, groups, "scale's") : reason;
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_linear_int4_args args = {};
    args.x = input_of(call, kX);
    args.weight = input_of(call, kWeight);
    args.scale = input_of(call, kScale);
    args.scale.dtype = v[kScaleType].integer == kOnnxHalf ? TE3_FLOAT16 : TE3_BFLOAT16;
    args.scale.shape[0] *= kScales;
    if (call.num_inputs > kZeroPoint) {
      args.zero_point = input_of(call, kZeroPoint);
      args.zero_point.dtype = TE3_UINT8;
      args.zero_point.shape[0] *= kZeroPoints;
    }
    args.y = output_of(call, 0);
    args.prefetch_safe = call.building ? 0 : 1;  // as Linear's
    te3_unpack_int4_args unpacked = {};
    unpacked.weight = args.weight;
    unpacked.scale = args.scale;
    unpacked.zero_point = args.zero_point;
    return multiply(call, args, linear_int4_params, linear_int4, unpacked, unpack_int4_params, unpack_int4);
  }

 private:
  DataType stored_type(int32_t) const override { return DataType::kINT32; }
};

}  // namespace

const Description& linear_int4_description() {
  static const LinearInt4 description;
  return description;
}

}  // namespace trt_eagle3
