// Descriptions as IPluginV2DynamicExt, for TensorRT 8.6.
#include "adapter.h"

#if NV_TENSORRT_MAJOR < 10

#include <cstring>
#include <deque>

#include "node.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // 8.6 calls IPluginV2 so, which its creators must return

namespace trt_eagle3 {
namespace {

using namespace nvinfer1;

class Plugin final : public IPluginV2DynamicExt {
 public:
  explicit Plugin(const Node& node) : node_(node) {}

  IPluginV2DynamicExt* clone() const noexcept override {
    auto* copy = new Plugin(node_);
    copy->namespace_ = namespace_;
    return copy;
  }
  DimsExprs getOutputDimensions(int32_t output, const DimsExprs* inputs, int32_t num_inputs,
                                IExprBuilder& builder) noexcept override {
    DimsExprs shape = {};
    if (!node_.output_shape(output, inputs, num_inputs, builder, &shape)) shape.nbDims = -1;
    return shape;
  }
  bool supportsFormatCombination(int32_t position, const PluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override {
    std::vector<const PluginTensorDesc*> pointers;
    for (int32_t i = 0; i <= position; ++i) pointers.push_back(&tensors[i]);
    return node_.supports(position, pointers, num_inputs, num_outputs);
  }
  // Cannot refuse; what does not fit is logged here and fails in enqueue.
  void configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc* out,
                       int32_t num_outputs) noexcept override {
    std::vector<const PluginTensorDesc*> tensors;
    for (int32_t i = 0; i < num_inputs; ++i) tensors.push_back(&in[i].desc);
    for (int32_t i = 0; i < num_outputs; ++i) tensors.push_back(&out[i].desc);
    node_.op().prepare();  // should a builder time what it did not initialise
    node_.configure(tensors, num_inputs, num_outputs);
  }
  size_t getWorkspaceSize(const PluginTensorDesc* in, int32_t num_inputs, const PluginTensorDesc*,
                          int32_t) const noexcept override {
    std::vector<Shape> shapes;
    std::vector<DataType> types;
    for (int32_t i = 0; i < num_inputs; ++i) {
      shapes.emplace_back(in[i].dims);
      types.push_back(in[i].type);
    }
    return node_.workspace_bytes(shapes, types);
  }
  int32_t enqueue(const PluginTensorDesc* in_desc, const PluginTensorDesc* out_desc, const void* const* in,
                  void* const* out, void* workspace, cudaStream_t stream) noexcept override {
    return node_.enqueue(in_desc, out_desc, in, out, workspace, stream);
  }

  // Cannot refuse either; the shapes can, which are asked for, too.
  DataType getOutputDataType(int32_t output, const DataType* inputs, int32_t num_inputs) const noexcept override {
    DataType type = DataType::kFLOAT;
    node_.output_type(output, inputs, num_inputs, &type);
    return type;
  }
  const char* getPluginType() const noexcept override { return node_.op().name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  int32_t getNbOutputs() const noexcept override { return node_.num_outputs(); }
  int32_t initialize() noexcept override {
    node_.op().prepare();
    return 0;
  }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return node_.serialize().size(); }
  void serialize(void* buffer) const noexcept override {
    const std::vector<char> bytes = node_.serialize();
    std::memcpy(buffer, bytes.data(), bytes.size());
  }
  void destroy() noexcept override { delete this; }
  void setPluginNamespace(const char* name) noexcept override { namespace_ = name != nullptr ? name : ""; }
  const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

 private:
  Node node_;
  std::string namespace_;
};

class PluginCreator final : public IPluginCreator {
 public:
  explicit PluginCreator(const Description& op) : op_(op), field_names_(op) {}

  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const PluginFieldCollection* getFieldNames() noexcept override { return field_names_.get(); }
  IPluginV2* createPlugin(const char*, const PluginFieldCollection* fields) noexcept override {
    return make(Node::from_fields(op_, fields, true));
  }
  IPluginV2* deserializePlugin(const char*, const void* data, size_t size) noexcept override {
    return make(Node::from_bytes(op_, data, size));
  }
  void setPluginNamespace(const char* name) noexcept override { namespace_ = name != nullptr ? name : ""; }
  const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

 private:
  IPluginV2* make(const std::unique_ptr<Node>& node) const {
    if (node == nullptr) return nullptr;
    auto* plugin = new Plugin(*node);
    plugin->setPluginNamespace(namespace_.c_str());
    return plugin;
  }

  const Description& op_;
  FieldNames field_names_;
  std::string namespace_;
};

}  // namespace

const std::vector<Creator*>& creators() {
  static std::deque<PluginCreator> owned;
  static const std::vector<Creator*> all = [] {
    std::vector<Creator*> list;
    for (const Description* op : descriptions()) list.push_back(&owned.emplace_back(*op));
    return list;
  }();
  return all;
}

}  // namespace trt_eagle3

#endif
