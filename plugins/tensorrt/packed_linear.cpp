#include "packed_linear.h"

namespace trt_eagle3 {

std::string PackedLinear::refuse_values(const Values& v) const {
  if (is_pinned(v[kComputeType]) && v[kComputeType].integer == 1) {
    return "compute_type: expected 10 (float16) or 16 (bfloat16), got 1 (float32)";
  }
  return refuse_type(v[kComputeType], attributes[kComputeType].name);
}

bool PackedLinear::accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const {
  const DataType type = types[position];
  if (position == kX) return type != DataType::kFLOAT && accepts_type(v[kComputeType], type);
  return type == (position < num_inputs ? stored_type(position) : types[kX]);
}

nvinfer1::DimsExprs PackedLinear::output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                               nvinfer1::IExprBuilder&) const {
  nvinfer1::DimsExprs out = in[kX];
  out.d[1] = in[kWeight].d[0];
  return out;
}

size_t PackedLinear::workspace_bytes(const Values&, size_t scratch_bytes, const std::vector<Shape>& in,
                                     const DataType*) const {
  return unpacked_offset(scratch_bytes) + static_cast<size_t>(in[kWeight].size[0] * in[kX].size[1]) * 2;
}

}  // namespace trt_eagle3
