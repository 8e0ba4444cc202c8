// Descriptions as IPluginV3, for TensorRT 10 and 11.
#include "adapter.h"

#if NV_TENSORRT_MAJOR >= 10

#include <deque>

#include "node.h"

namespace trt_eagle3 {
namespace {

using namespace nvinfer1;

// Outputs that alias inputs can be declared from 10.3 on (and PreviewFeature::kALIASED_PLUGIN_IO_10_03 must be set).
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
#define TRT_EAGLE3_DECLARES_ALIASES 1
using Build = IPluginV3OneBuildV2;
#else
using Build = IPluginV3OneBuild;
#endif

constexpr const char* kRecord = "record";  // the one serialized field: Node::serialize()

class Plugin final : public IPluginV3, public IPluginV3OneCore, public Build, public IPluginV3OneRuntime {
 public:
  explicit Plugin(const Node& node) : node_(node) {}
  Plugin(const Plugin& other)
      : IPluginV3(other), IPluginV3OneCore(other), Build(other), IPluginV3OneRuntime(other), node_(other.node_) {}

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE:
        return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD:
        return static_cast<Build*>(this);
      case PluginCapabilityType::kRUNTIME:
        return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  IPluginV3* clone() noexcept override { return new Plugin(*this); }

  const char* getPluginName() const noexcept override { return node_.op().name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return ""; }

  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc* out,
                          int32_t num_outputs) noexcept override {
    std::vector<const PluginTensorDesc*> tensors;
    for (int32_t i = 0; i < num_inputs; ++i) tensors.push_back(&in[i].desc);
    for (int32_t i = 0; i < num_outputs; ++i) tensors.push_back(&out[i].desc);
    node_.op().prepare();  // a builder times plugins that it attached to no context
    return !node_.configure(tensors, num_inputs, num_outputs);
  }
  int32_t getOutputDataTypes(DataType* out, int32_t num_outputs, const DataType* in,
                             int32_t num_inputs) const noexcept override {
    for (int32_t i = 0; i < num_outputs; ++i) {
      if (!node_.output_type(i, in, num_inputs, &out[i])) return 1;
    }
    return 0;
  }
  int32_t getOutputShapes(const DimsExprs* in, int32_t num_inputs, const DimsExprs*, int32_t, DimsExprs* out,
                          int32_t num_outputs, IExprBuilder& builder) noexcept override {
    for (int32_t i = 0; i < num_outputs; ++i) {
      if (!node_.output_shape(i, in, num_inputs, builder, &out[i])) return 1;
    }
    return 0;
  }
  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override {
    std::vector<const PluginTensorDesc*> pointers;
    for (int32_t i = 0; i <= position; ++i) pointers.push_back(&tensors[i].desc);
    return node_.supports(position, pointers, num_inputs, num_outputs);
  }
  int32_t getNbOutputs() const noexcept override { return node_.num_outputs(); }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    std::vector<Shape> shapes;
    std::vector<DataType> types;
    for (int32_t i = 0; i < num_inputs; ++i) {
      shapes.emplace_back(in[i].max);
      types.push_back(in[i].desc.type);
    }
    return node_.workspace_bytes(shapes, types);
  }
  const char* getTimingCacheID() noexcept override { return node_.text().c_str(); }
  const char* getMetadataString() noexcept override { return node_.text().c_str(); }
#ifdef TRT_EAGLE3_DECLARES_ALIASES
  int32_t getAliasedInput(int32_t output) noexcept override { return node_.op().aliased_input(output); }
#endif

  int32_t onShapeChange(const PluginTensorDesc* in, int32_t num_inputs, const PluginTensorDesc* out,
                        int32_t num_outputs) noexcept override {
    std::vector<const PluginTensorDesc*> tensors;
    for (int32_t i = 0; i < num_inputs; ++i) tensors.push_back(&in[i]);
    for (int32_t i = 0; i < num_outputs; ++i) tensors.push_back(&out[i]);
    return !node_.configure(tensors, num_inputs, num_outputs);
  }
  int32_t enqueue(const PluginTensorDesc* in_desc, const PluginTensorDesc* out_desc, const void* const* in,
                  void* const* out, void* workspace, cudaStream_t stream) noexcept override {
    return node_.enqueue(in_desc, out_desc, in, out, workspace, stream);
  }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
    node_.op().prepare();
    return clone();
  }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    record_ = node_.serialize();
    field_ = PluginField(kRecord, record_.data(), PluginFieldType::kUNKNOWN, static_cast<int32_t>(record_.size()));
    fields_.nbFields = 1;
    fields_.fields = &field_;
    return &fields_;
  }

 private:
  Node node_;
  std::vector<char> record_;
  PluginField field_;
  PluginFieldCollection fields_ = {};
};

class PluginCreator final : public IPluginCreatorV3One {
 public:
  explicit PluginCreator(const Description& op) : op_(op), field_names_(op) {}

  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return ""; }
  const PluginFieldCollection* getFieldNames() noexcept override { return field_names_.get(); }
  IPluginV3* createPlugin(const char*, const PluginFieldCollection* fields, TensorRTPhase phase) noexcept override {
    const auto node = phase == TensorRTPhase::kBUILD ? Node::from_fields(op_, fields, true) : loaded(fields);
    return node == nullptr ? nullptr : new Plugin(*node);
  }

 private:
  std::unique_ptr<Node> loaded(const PluginFieldCollection* fields) const {
    const bool has_record = fields != nullptr && fields->nbFields == 1 && fields->fields[0].name != nullptr &&
                            std::string(fields->fields[0].name) == kRecord && fields->fields[0].length >= 0;
    if (!has_record) return Node::from_bytes(op_, nullptr, 0);
    return Node::from_bytes(op_, fields->fields[0].data, static_cast<size_t>(fields->fields[0].length));
  }

  const Description& op_;
  FieldNames field_names_;
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
