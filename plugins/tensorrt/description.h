// What TensorRT has to know of an op: its tensors, attributes, types, shapes and launch. An adapter (adapter_v2.cpp,
// adapter_v3.cpp) turns a description into a plugin of the version at hand; a description knows of no version.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../capi/lists.h"

namespace trt_eagle3 {

using nvinfer1::DataType;

struct Attribute {
  const char* name;
  bool is_float;
  bool required;
};

struct Value {
  bool given = false;
  int32_t integer = 0;
  float real = 0.0f;
};

// A node's attributes, in the description's order.
using Values = std::vector<Value>;

struct Port {
  const char* name;
  int32_t rank;
};

constexpr int64_t kUnknown = -1;  // a size that is not known yet

struct Shape {
  int32_t rank = 0;
  int64_t size[nvinfer1::Dims::MAX_DIMS] = {};

  Shape() = default;
  explicit Shape(const nvinfer1::Dims& dims);
  explicit Shape(const nvinfer1::DimsExprs& dims);  // sizes that are no constants are unknown
};

// One launch. The caches of an op with aliased outputs may or may not be one memory.
struct Call {
  const nvinfer1::PluginTensorDesc* in_desc;
  const nvinfer1::PluginTensorDesc* out_desc;
  const void* const* in;
  void* const* out;
  int32_t num_inputs;
  void* workspace;
  size_t scratch_bytes;  // what make_scratch_bytes() said when the engine was built
  bool building;         // the builder may time on inputs of any content
  cudaStream_t stream;
};

// All functions but prepare() and launch() are pure; those that return a string return a reason to refuse, empty if
// there is none.
class Description {
 public:
  Description(const char* name, std::vector<Attribute> attributes, std::vector<Port> inputs, std::vector<Port> outputs)
      : name(name), attributes(std::move(attributes)), inputs(std::move(inputs)), outputs(std::move(outputs)) {}
  virtual ~Description() = default;

  const char* const name;
  const std::vector<Attribute> attributes;
  const std::vector<Port> inputs;  // optional ones last
  const std::vector<Port> outputs;

  virtual std::string refuse_values(const Values& values) const = 0;
  virtual int32_t num_outputs(const Values&) const { return static_cast<int32_t>(outputs.size()); }
  virtual std::string refuse_num_inputs(const Values& values, int32_t count) const;

  // May tensor `position` (inputs, then outputs) have its type, given those before it? Layouts are always linear.
  virtual bool accepts(const Values& values, int32_t position, const DataType* types, int32_t num_inputs) const = 0;
  virtual DataType output_type(int32_t output, const DataType* inputs) const = 0;

  // Sizes and attributes that contradict each other, as far as the sizes are known.
  virtual std::string refuse_shapes(const Values& values, const std::vector<Shape>& inputs) const = 0;
  virtual nvinfer1::DimsExprs output_shape(const Values& values, int32_t output, const nvinfer1::DimsExprs* inputs,
                                           nvinfer1::IExprBuilder& builder) const = 0;
  virtual int32_t aliased_input(int32_t) const { return -1; }

  // Bytes of scratch for any shapes on this GPU; found when a network is made, kept in the engine.
  virtual size_t make_scratch_bytes(const Values&) const { return 0; }
  // Bytes of workspace for inputs no larger than these.
  virtual size_t workspace_bytes(const Values&, size_t scratch_bytes, const std::vector<Shape>&,
                                 const DataType*) const {
    return scratch_bytes;
  }

  // What a launch must find made, because it may be captured in a CUDA graph. Adapters call it wherever TensorRT
  // readies a plugin, so it is cheap when repeated; what fails here is told by the launch that cannot do without.
  virtual void prepare() const {}

  virtual std::string launch(const Values& values, const Call& call) const = 0;
};

#define TE3_DECLARE(op) const Description& op##_description();
TE3_PLUGINS(TE3_DECLARE)
#undef TE3_DECLARE

// All of them, in a fixed order.
const std::vector<const Description*>& descriptions();

// What is wrong with a node's inputs: their number, ranks, or sizes.
std::string refuse_inputs(const Description& op, const Values& values, const std::vector<Shape>& inputs);

// `size` unless it is unknown or right: then why it is refused.
std::string refuse_size(const char* tensor, const Shape& shape, int32_t axis, int64_t expected, const char* meaning);

// float32, float16 or, where this TensorRT has it, bfloat16.
bool is_floating(DataType type);

// A type attribute holds a number of onnx's TensorProto.DataType: 1, 10 or 16. 0 counts as absent.
std::string refuse_type(const Value& value, const char* name);
bool is_pinned(const Value& value);
DataType pinned_type(const Value& value);
bool accepts_type(const Value& pin, DataType type);  // floating, and the pinned one where there is one

}  // namespace trt_eagle3
