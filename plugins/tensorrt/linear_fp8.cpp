// LinearFp8: codes are e4m3.
#include "byte_linear.h"

namespace trt_eagle3 {
namespace {

struct Fp8Kernels {
  using Args = te3_linear_fp8_args;
  using UnpackArgs = te3_unpack_fp8_args;
  static constexpr const char* kName = "LinearFp8";
  static constexpr int32_t kDType = TE3_FLOAT8_E4M3FN;
  static constexpr auto params = linear_fp8_params;
  static constexpr auto linear = linear_fp8;
  static constexpr auto unpack_params = unpack_fp8_params;
  static constexpr auto unpack = unpack_fp8;
};

}  // namespace

const Description& linear_fp8_description() {
  static const ByteLinear<Fp8Kernels> description;
  return description;
}

}  // namespace trt_eagle3
