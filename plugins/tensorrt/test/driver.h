// One plugin as a builder and a runtime drive it, the same for both generations of the plugin interface.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace driver {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorFormat;

struct Field {
  Field(const char* name, int32_t value) : name(name), type(PluginFieldType::kINT32), integer(value) {}
  Field(const char* name, double value)
      : name(name), type(PluginFieldType::kFLOAT32), real(static_cast<float>(value)) {}

  const char* name;
  PluginFieldType type;
  int32_t integer = 0;
  float real = 0.0f;
};

struct Tensor {
  DataType type;
  std::vector<int64_t> sizes;      // -1: dynamic
  std::vector<int64_t> max_sizes;  // empty: as sizes
  TensorFormat format = TensorFormat::kLINEAR;
};
using Tensors = std::vector<Tensor>;

nvinfer1::PluginTensorDesc desc_of(const Tensor& tensor);

class Plugin {
 public:
  virtual ~Plugin() = default;
  virtual std::unique_ptr<Plugin> clone() = 0;
  // None if the plugin refuses; 8.6 cannot refuse, and says float32.
  virtual std::vector<DataType> output_types(const Tensors& in) = 0;
  // Output shapes with dynamic sizes as the negative numbers of the inputs'; none if the plugin refuses.
  virtual std::optional<std::vector<std::vector<int64_t>>> output_shapes(const Tensors& in) = 0;
  virtual bool supports(const Tensors& all, int32_t position, int32_t num_inputs) = 0;
  // What the builder, then what the runtime says of the tensors. False if refused; 8.6 cannot refuse.
  virtual bool configure(const Tensors& in, const Tensors& out) = 0;
  virtual bool change_shapes(const Tensors& in, const Tensors& out) = 0;
  virtual size_t workspace_bytes(const Tensors& in, const Tensors& out) = 0;
  virtual std::vector<char> serialize() = 0;
  virtual int32_t num_outputs() = 0;
  virtual int32_t aliased_input(int32_t output) = 0;  // -2: this version cannot say
  virtual int32_t enqueue(const Tensors& in, const Tensors& out, const std::vector<const void*>& inputs,
                          const std::vector<void*>& outputs, void* workspace, cudaStream_t stream) = 0;
};

// Through the creator that the library registered; null if it refuses.
std::unique_ptr<Plugin> create(const std::string& name, const std::vector<Field>& fields);
std::unique_ptr<Plugin> deserialize(const std::string& name, const std::vector<char>& bytes);

// Names of a creator's fields; empty if there is no such creator under this version and namespace.
std::vector<std::string> field_names(const std::string& name);

std::vector<nvinfer1::PluginField> plugin_fields(const std::vector<Field>& fields);
std::vector<nvinfer1::PluginTensorDesc> descs_of(const Tensors& tensors);
std::vector<nvinfer1::DynamicPluginTensorDesc> dynamic_descs_of(const Tensors& tensors);

}  // namespace driver
