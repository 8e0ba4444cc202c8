#include "../../capi/lists.h"
#include "driver.h"
#include "stand_in.h"

#if NV_TENSORRT_MAJOR >= 10

using namespace nvinfer1;

namespace driver {
namespace {

IPluginCreatorV3One* creator_of(const std::string& name) {
  for (IPluginCreatorInterface* any : stand_in::creators()) {
    if (std::string(any->getInterfaceInfo().kind) != "PLUGIN CREATOR_V3ONE") continue;
    auto* creator = static_cast<IPluginCreatorV3One*>(any);
    const bool same = name == creator->getPluginName() &&
                      std::string(creator->getPluginVersion()) == TE3_PLUGIN_VERSION &&
                      std::string(creator->getPluginNamespace()) == "";
    if (same) return creator;
  }
  return nullptr;
}

class PluginV3 final : public Plugin {
 public:
  explicit PluginV3(IPluginV3* plugin) : plugin_(plugin) {}

  std::unique_ptr<Plugin> clone() override { return std::make_unique<PluginV3>(plugin_->clone()); }
  std::vector<DataType> output_types(const Tensors& in) override {
    std::vector<DataType> types, outs(num_outputs());
    for (const Tensor& tensor : in) types.push_back(tensor.type);
    const int32_t error = build()->getOutputDataTypes(outs.data(), static_cast<int32_t>(outs.size()), types.data(),
                                                      static_cast<int32_t>(types.size()));
    return error == 0 ? outs : std::vector<DataType>();
  }
  std::optional<std::vector<std::vector<int64_t>>> output_shapes(const Tensors& in) override {
    stand_in::Expressions expressions;
    std::vector<DimsExprs> shapes, outs(num_outputs());
    for (const Tensor& tensor : in) shapes.push_back(expressions.make(tensor.sizes));
    if (build()->getOutputShapes(shapes.data(), static_cast<int32_t>(shapes.size()), nullptr, 0, outs.data(),
                                 static_cast<int32_t>(outs.size()), expressions.builder()) != 0) {
      return std::nullopt;
    }
    std::vector<std::vector<int64_t>> sizes;
    for (const DimsExprs& out : outs) sizes.push_back(stand_in::Expressions::read(out));
    return sizes;
  }
  bool supports(const Tensors& all, int32_t position, int32_t num_inputs) override {
    const auto descs = dynamic_descs_of(Tensors(all.begin(), all.begin() + position + 1));  // what follows is not there
    return build()->supportsFormatCombination(position, descs.data(), num_inputs,
                                              static_cast<int32_t>(all.size()) - num_inputs);
  }
  bool configure(const Tensors& in, const Tensors& out) override {
    const auto ins = dynamic_descs_of(in), outs = dynamic_descs_of(out);
    return build()->configurePlugin(ins.data(), static_cast<int32_t>(ins.size()), outs.data(),
                                    static_cast<int32_t>(outs.size())) == 0;
  }
  bool change_shapes(const Tensors& in, const Tensors& out) override {
    std::unique_ptr<IPluginV3> attached(runtime()->attachToContext(nullptr));
    plugin_ = std::move(attached);
    const auto ins = descs_of(in), outs = descs_of(out);
    return runtime()->onShapeChange(ins.data(), static_cast<int32_t>(ins.size()), outs.data(),
                                    static_cast<int32_t>(outs.size())) == 0;
  }
  size_t workspace_bytes(const Tensors& in, const Tensors& out) override {
    const auto ins = dynamic_descs_of(in), outs = dynamic_descs_of(out);
    return build()->getWorkspaceSize(ins.data(), static_cast<int32_t>(ins.size()), outs.data(),
                                     static_cast<int32_t>(outs.size()));
  }
  // The one field's bytes: what TensorRT keeps in the engine.
  std::vector<char> serialize() override {
    const PluginFieldCollection* fields = runtime()->getFieldsToSerialize();
    if (fields->nbFields != 1 || fields->fields[0].type != PluginFieldType::kUNKNOWN) return {};
    const auto* bytes = static_cast<const char*>(fields->fields[0].data);
    return std::vector<char>(bytes, bytes + fields->fields[0].length);
  }
  int32_t num_outputs() override { return build()->getNbOutputs(); }
  int32_t aliased_input([[maybe_unused]] int32_t output) override {
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
    const auto info = build()->getInterfaceInfo();
    if (info.major < 2) return -3;
    return static_cast<IPluginV3OneBuildV2*>(build())->getAliasedInput(output);
#else
    return -2;
#endif
  }
  int32_t enqueue(const Tensors& in, const Tensors& out, const std::vector<const void*>& inputs,
                  const std::vector<void*>& outputs, void* workspace, cudaStream_t stream) override {
    const auto ins = descs_of(in), outs = descs_of(out);
    return runtime()->enqueue(ins.data(), outs.data(), inputs.data(), outputs.data(), workspace, stream);
  }

 private:
  IPluginV3OneBuild* build() {
    return static_cast<IPluginV3OneBuild*>(plugin_->getCapabilityInterface(PluginCapabilityType::kBUILD));
  }
  IPluginV3OneRuntime* runtime() {
    return static_cast<IPluginV3OneRuntime*>(plugin_->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  }
  std::unique_ptr<IPluginV3> plugin_;
};

std::unique_ptr<Plugin> wrap(IPluginV3* plugin) {
  return plugin == nullptr ? nullptr : std::make_unique<PluginV3>(plugin);
}

}  // namespace

std::unique_ptr<Plugin> create(const std::string& name, const std::vector<Field>& fields) {
  const auto list = plugin_fields(fields);
  const PluginFieldCollection collection = {static_cast<int32_t>(list.size()), list.data()};
  return wrap(creator_of(name)->createPlugin("node", &collection, TensorRTPhase::kBUILD));
}

std::unique_ptr<Plugin> deserialize(const std::string& name, const std::vector<char>& bytes) {
  const PluginField field("record", bytes.data(), PluginFieldType::kUNKNOWN, static_cast<int32_t>(bytes.size()));
  const PluginFieldCollection collection = {1, &field};
  return wrap(creator_of(name)->createPlugin("node", &collection, TensorRTPhase::kRUNTIME));
}

std::vector<std::string> field_names(const std::string& name) {
  std::vector<std::string> names;
  IPluginCreatorV3One* creator = creator_of(name);
  for (int32_t i = 0; creator != nullptr && i < creator->getFieldNames()->nbFields; ++i) {
    names.emplace_back(creator->getFieldNames()->fields[i].name);
  }
  return names;
}

}  // namespace driver

#endif
