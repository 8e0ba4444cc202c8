// FusedMoeFp8: a mixture of experts whose weights are e4m3. Types: T of x, router_logits and y; weights are int32, four
// codes in one, in the order of kernels/packed_weight.cuh; scales are float32.
#include "mixture.h"

namespace trt_eagle3 {
namespace {

enum { kGateUp = 2, kGateUpScale, kDown, kDownScale };
constexpr int64_t kCodes = 4, kBlock = 128;

// Of a weight [E, N, K].
std::string refuse_scale(const char* tensor, const Shape& scale, int64_t experts, int64_t outer, int64_t inner) {
  std::string reason = refuse_size(tensor, scale, 0, experts, "E of gate_up");
  const int64_t rows = scale.size[1], columns = scale.size[2];
  const bool known = outer != kUnknown && inner != kUnknown && rows != kUnknown && columns != kUnknown;
  if (!reason.empty() || !known) return reason;
  const bool fits = (rows == outer || rows == (outer + kBlock - 1) / kBlock || rows == 1) &&
                    (columns == 1 || columns == inner / kBlock);
  return fits ? ""
              : std::string(tensor) + ": expected N, ceil(N / 128) or 1 rows and 1 or K / 128 columns, got [" +
                    std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

class FusedMoeFp8 final : public Mixture {
 public:
  FusedMoeFp8()
      : Mixture("FusedMoeFp8", {}, {{"gate_up", 3}, {"gate_up_scale", 3}, {"down", 3}, {"down_scale", 3}},
                {kDown, kCodes, kBlock, kBlock}) {}

  size_t workspace_bytes(const Values& v, size_t, const std::vector<Shape>& in, const DataType*) const override {
    return bytes_of(v, in, fused_moe_fp8_workspace);
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_fused_moe_fp8_args args = {};
    args.gate_up = codes_of(call, kGateUp);
    args.gate_up_scale = input_of(call, kGateUpScale);
    args.down = codes_of(call, kDown);
    args.down_scale = input_of(call, kDownScale);
    return mix(v, call, args, fused_moe_fp8_params, fused_moe_fp8_workspace, fused_moe_fp8);
  }

 private:
  static te3_tensor codes_of(const Call& call, int32_t input) {
    te3_tensor codes = input_of(call, input);
    codes.dtype = TE3_FLOAT8_E4M3FN;
    codes.shape[2] *= kCodes;
    return codes;
  }

  DataType stored_type(int32_t position, DataType) const override {
    return position == kGateUpScale || position == kDownScale ? DataType::kFLOAT : DataType::kINT32;
  }

  std::string refuse_scales(const std::vector<Shape>& in, int64_t hidden, int64_t width) const override {
    const int64_t experts = in[kGateUp].size[0], outer = width == kUnknown ? kUnknown : 2 * width;
    const std::string reason = refuse_scale("gate_up_scale", in[kGateUpScale], experts, outer, hidden);
    return reason.empty() ? refuse_scale("down_scale", in[kDownScale], experts, hidden, width) : reason;
  }
};

}  // namespace

const Description& fused_moe_fp8_description() {
  static const FusedMoeFp8 description;
  return description;
}

}  // namespace trt_eagle3
