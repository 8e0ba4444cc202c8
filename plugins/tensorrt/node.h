// A node: a description with the values of its attributes. What both adapters share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "description.h"
#include "log.h"

namespace trt_eagle3 {

class Node {
 public:
  // Reads a creator's fields. Null, with a logged reason, if an attribute is missing, of another type or out of range.
  // `building`: the node is part of a network, not of an engine that is loaded.
  static std::unique_ptr<Node> from_fields(const Description& op, const nvinfer1::PluginFieldCollection* fields,
                                           bool building);
  // Reads what serialize() wrote. Null, with a logged reason, if that is not it.
  static std::unique_ptr<Node> from_bytes(const Description& op, const void* data, size_t size);

  std::vector<char> serialize() const;
  const std::string& text() const { return text_; }  // the attributes, for people and for the timing cache

  const Description& op() const { return *op_; }
  const Values& values() const { return values_; }
  size_t scratch_bytes() const { return scratch_bytes_; }
  int32_t num_outputs() const { return op_->num_outputs(values_); }

  // May tensor `position` have its type and format? `tensors` are inputs, then outputs; later ones are not looked at.
  bool supports(int32_t position, const std::vector<const nvinfer1::PluginTensorDesc*>& tensors, int32_t num_inputs,
                int32_t num_outputs) const;
  // The type of an output; false, with a logged reason, if there are not the inputs that it follows from.
  bool output_type(int32_t output, const DataType* inputs, int32_t num_inputs, DataType* type) const;
  // The shape of an output; false, with a logged reason, if the inputs do not fit together.
  bool output_shape(int32_t output, const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                    nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs* shape);
  // Takes the tensors that the node will run with; false, with a logged reason, if it cannot, and then enqueue() fails.
  bool configure(const std::vector<const nvinfer1::PluginTensorDesc*>& tensors, int32_t num_inputs,
                 int32_t num_outputs);
  size_t workspace_bytes(const std::vector<Shape>& max_inputs, const std::vector<DataType>& types) const;
  // 0, or 1 with a logged reason.
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in_desc, const nvinfer1::PluginTensorDesc* out_desc,
                  const void* const* in, void* const* out, void* workspace, cudaStream_t stream) const;

 private:
  Node(const Description& op, Values values, int32_t num_inputs, size_t scratch_bytes, bool building);
  std::string refuse_tensors(const std::vector<const nvinfer1::PluginTensorDesc*>& tensors, int32_t num_inputs,
                             int32_t num_outputs) const;
  bool refuse(const std::string& reason) const;  // logs; always false

  const Description* op_;
  Values values_;
  int32_t num_inputs_;  // 0: not known yet, or configured with tensors that it cannot run with
  size_t scratch_bytes_;
  bool building_;
  std::string text_;
};

// The names and types of a description's attributes, as a creator tells them.
class FieldNames {
 public:
  explicit FieldNames(const Description& op);
  const nvinfer1::PluginFieldCollection* get() const { return &collection_; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_ = {};
};

constexpr const char* kPluginVersion = TE3_PLUGIN_VERSION;

}  // namespace trt_eagle3
