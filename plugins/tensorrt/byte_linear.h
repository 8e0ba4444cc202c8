// LinearFp8 and LinearInt8: y = x . (weight * scale)^T with a number in a byte. Types: T of x and y; weight is int32,
// four codes in one, in the order of kernels/packed_weight.cuh; scale is float32.
#pragma once

#include "packed_linear.h"

namespace trt_eagle3 {

// `Kernels`: the plugin's name, the type of the codes, and the functions of the format with their arguments.
template <typename Kernels>
class ByteLinear final : public PackedLinear {
 public:
  ByteLinear()
      : PackedLinear(Kernels::kName, {{"compute_type", false, false}}, {{"x", 2}, {"weight", 2}, {"scale", 2}},
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
    typename Kernels::Args args = {};
    args.x = input_of(call, kX);
    args.weight = input_of(call, kWeight);
    args.weight.dtype = Kernels::kDType;
    args.weight.shape[1] *= kCodes;
    args.scale = input_of(call, kScale);
    args.y = output_of(call, 0);
    args.prefetch_safe = call.building ? 0 : 1;  // as Linear's
    typename Kernels::UnpackArgs unpacked = {};
    unpacked.weight = args.weight;
    unpacked.scale = args.scale;
    return multiply(call, args, Kernels::params, Kernels::linear, unpacked, Kernels::unpack_params, Kernels::unpack);
  }

 private:
  static constexpr int64_t kCodes = 4;    // in an int32
  static constexpr int64_t kBlock = 128;  // rows or columns that share a scale

  DataType stored_type(int32_t position) const override {
    return position == kScale ? DataType::kFLOAT : DataType::kINT32;
  }
};

}  // namespace trt_eagle3
