#include "description.h"

namespace trt_eagle3 {
namespace {

constexpr int32_t kOnnxFloat = 1, kOnnxHalf = 10, kOnnxBFloat16 = 16;

}  // namespace

Shape::Shape(const nvinfer1::Dims& dims) : rank(dims.nbDims) {
  for (int32_t i = 0; i < rank; ++i) size[i] = dims.d[i];
}

Shape::Shape(const nvinfer1::DimsExprs& dims) : rank(dims.nbDims) {
  for (int32_t i = 0; i < rank; ++i) size[i] = dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : kUnknown;
}

const std::vector<const Description*>& descriptions() {
#define TE3_DESCRIPTION(op) &op##_description(),
  static const std::vector<const Description*> all = {TE3_PLUGINS(TE3_DESCRIPTION)};
#undef TE3_DESCRIPTION
  return all;
}

std::string Description::refuse_num_inputs(const Values&, int32_t count) const {
  const auto wanted = static_cast<int32_t>(inputs.size());
  if (count == wanted) return "";
  return "expected " + std::to_string(wanted) + " inputs, got " + std::to_string(count);
}

std::string refuse_inputs(const Description& op, const Values& values, const std::vector<Shape>& inputs) {
  if (std::string reason = op.refuse_num_inputs(values, static_cast<int32_t>(inputs.size())); !reason.empty()) {
    return reason;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].rank == op.inputs[i].rank) continue;
    return std::string(op.inputs[i].name) + ": expected " + std::to_string(op.inputs[i].rank) + " axes, got " +
           std::to_string(inputs[i].rank);
  }
  return op.refuse_shapes(values, inputs);
}

std::string refuse_size(const char* tensor, const Shape& shape, int32_t axis, int64_t expected, const char* meaning) {
  const int64_t size = shape.size[axis];
  if (size == kUnknown || expected == kUnknown || size == expected) return "";
  return std::string(tensor) + ": axis " + std::to_string(axis) + ": expected " + meaning + " = " +
         std::to_string(expected) + ", got " + std::to_string(size);
}

bool is_floating(DataType type) {
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kBF16) return true;
#endif
  return type == DataType::kFLOAT || type == DataType::kHALF;
}

bool is_pinned(const Value& value) { return value.given && value.integer != 0; }

DataType pinned_type(const Value& value) {
#if NV_TENSORRT_MAJOR >= 10
  if (value.integer == kOnnxBFloat16) return DataType::kBF16;
#endif
  return value.integer == kOnnxHalf ? DataType::kHALF : DataType::kFLOAT;
}

bool accepts_type(const Value& pin, DataType type) {
  return is_floating(type) && (!is_pinned(pin) || type == pinned_type(pin));
}

std::string refuse_type(const Value& value, const char* name) {
  if (!is_pinned(value) || value.integer == kOnnxFloat || value.integer == kOnnxHalf) return "";
  if (value.integer == kOnnxBFloat16) {
    return NV_TENSORRT_MAJOR >= 10 ? "" : std::string(name) + ": bfloat16 needs TensorRT 10. Build as float16";
  }
  return std::string(name) + ": expected 1 (float32), 10 (float16) or 16 (bfloat16), got " +
         std::to_string(value.integer);
}

}  // namespace trt_eagle3
