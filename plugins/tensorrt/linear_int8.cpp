// LinearInt8: codes are numbers + 128.
#include "byte_linear.h"

namespace trt_eagle3 {
namespace {

struct Int8Kernels {
  using Args = te3_linear_int8_args;
  using UnpackArgs = te3_unpack_int8_args;
  static constexpr const char* kName = "LinearInt8";
  static constexpr int32_t kDType = TE3_UINT8;
  static constexpr auto params = linear_int8_params;
  static constexpr auto linear = linear_int8;
  static constexpr auto unpack_params = unpack_int8_params;
  static constexpr auto unpack = unpack_int8;
};

}  // namespace

const Description& linear_int8_description() {
  static const ByteLinear<Int8Kernels> description;
  return description;
}

}  // namespace trt_eagle3
