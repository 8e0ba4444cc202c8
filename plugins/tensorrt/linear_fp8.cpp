// LinearFp8: y = x . (weight * scale)^T. Types: T of x and y; weight is int32, four e4m3 codes in one, in the order of
// kernels/packed_weight.cuh; scale is float32.
#include "packed_linear.h"

namespace trt_eagle3 {
namespace {

constexpr int64_t kCodes = 4;    // in an int32
constexpr int64_t kBlock = 128;  // rows or columns that share a scale

class LinearFp8 final : public PackedLinear {
 public:
  LinearFp8()
      : PackedLinear("LinearFp8", {{"compute_type", false, false}}, {{"x", 2}, {"weight", 2}, {"scale", 2}},
                     {{"y", 2}}) {}

  std::string refuse_shapes(const Values&, const std::vector<Shape>& in) const override {
    const int64_t inner = in[kX].size[1], outer = in[kWeight].size[0];
    const int64_t rows = in[kScale].size[0], columns = in[kScale].size[1];
    const std::string reason = refuse_size("weight", in[kWeight], 1, part(inner, kCodes), "K of x / 4");
    const bool known = inner != kUnknown && outer != kUnknown && rows != kUnknown && columns != kUnknown;
    if (!reason.empty() || !known) return reason;
    const bool fits = (rows == outer || rows == (outer + kBlock - 1) / kBlock || rows == 1) &&
                      (columns == 1 || columns == inner / kBlock);
    return fits ? ""
                : "scale: expected N, ceil(N / 128) or 1 rows and 1 or K / 128 columns, got [" + std::to_string(rows) +
                      ", " + std::to_string(columns) + "]";
  }

  std::string launch(const Values&, const Call& call) const override {
    te3_linear_fp8_args args = {};
    args.x = input_of(call, kX);
    args.weight = input_of(call, kWeight);
    args.weight.dtype = TE3_FLOAT8_E4M3FN;
    args.weight.shape[1] *= kCodes;
    args.scale = input_of(call, kScale);
    args.y = output_of(call, 0);
    args.prefetch_safe = call.building ? 0 : 1;  // as Linear's
    te3_unpack_fp8_args unpacked = {};
    unpacked.weight = args.weight;
    unpacked.scale = args.scale;
    return multiply(call, args, linear_fp8_params, linear_fp8, unpacked, unpack_fp8_params, unpack_fp8);
  }

 private:
  DataType stored_type(int32_t position) const override {
    return position == kScale ? DataType::kFLOAT : DataType::kINT32;
  }
};

}  // namespace

const Description& linear_fp8_description() {
  static const LinearFp8 description;
  return description;
}

}  // namespace trt_eagle3
