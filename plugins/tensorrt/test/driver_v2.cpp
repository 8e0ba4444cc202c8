#include "../../capi/lists.h"
#include "driver.h"
#include "stand_in.h"

using namespace nvinfer1;

namespace driver {

PluginTensorDesc desc_of(const Tensor& tensor) {
  PluginTensorDesc desc = {};
  desc.type = tensor.type;
  desc.format = tensor.format;
  desc.dims.nbDims = static_cast<int32_t>(tensor.sizes.size());
  for (size_t i = 0; i < tensor.sizes.size(); ++i) desc.dims.d[i] = tensor.sizes[i];
  return desc;
}

std::vector<PluginTensorDesc> descs_of(const Tensors& tensors) {
  std::vector<PluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) descs.push_back(desc_of(tensor));
  return descs;
}

std::vector<DynamicPluginTensorDesc> dynamic_descs_of(const Tensors& tensors) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) {
    DynamicPluginTensorDesc desc = {};
    desc.desc = desc_of(tensor);
    desc.min = desc.max = desc.desc.dims;
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
      desc.max.d[i] = tensor.max_sizes.empty() ? tensor.sizes[i] : tensor.max_sizes[i];
      if (tensor.sizes[i] < 0) desc.min.d[i] = 1;
    }
    descs.push_back(desc);
  }
  return descs;
}

std::vector<PluginField> plugin_fields(const std::vector<Field>& fields) {
  std::vector<PluginField> list;
  for (const Field& field : fields) {
    const bool real = field.type == PluginFieldType::kFLOAT32;
    const void* data = real ? static_cast<const void*>(&field.real) : &field.integer;
    list.emplace_back(field.name, data, field.type, 1);
  }
  return list;
}

}  // namespace driver

#if NV_TENSORRT_MAJOR < 10
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // IPluginV2

namespace driver {
namespace {

IPluginCreator* creator_of(const std::string& name) {
  for (IPluginCreator* creator : stand_in::creators()) {
    const bool same = name == creator->getPluginName() &&
                      std::string(creator->getPluginVersion()) == TE3_PLUGIN_VERSION &&
                      std::string(creator->getPluginNamespace()) == "";
    if (same) return creator;
  }
  return nullptr;
}

class PluginV2 final : public Plugin {
 public:
  explicit PluginV2(IPluginV2* plugin) : plugin_(static_cast<IPluginV2DynamicExt*>(plugin)) {}
  ~PluginV2() override {
    plugin_->terminate();
    plugin_->destroy();
  }
  std::unique_ptr<Plugin> clone() override { return std::make_unique<PluginV2>(plugin_->clone()); }
  std::vector<DataType> output_types(const Tensors& in) override {
    std::vector<DataType> types, outs;
    for (const Tensor& tensor : in) types.push_back(tensor.type);
    for (int32_t i = 0; i < num_outputs(); ++i) {
      outs.push_back(plugin_->getOutputDataType(i, types.data(), static_cast<int32_t>(types.size())));
    }
    return outs;
  }
  std::optional<std::vector<std::vector<int64_t>>> output_shapes(const Tensors& in) override {
    stand_in::Expressions expressions;
    std::vector<DimsExprs> shapes;
    for (const Tensor& tensor : in) shapes.push_back(expressions.make(tensor.sizes));
    std::vector<std::vector<int64_t>> outs;
    for (int32_t i = 0; i < num_outputs(); ++i) {
      const DimsExprs out =
          plugin_->getOutputDimensions(i, shapes.data(), static_cast<int32_t>(shapes.size()), expressions.builder());
      if (out.nbDims < 0) return std::nullopt;
      outs.push_back(stand_in::Expressions::read(out));
    }
    return outs;
  }
  bool supports(const Tensors& all, int32_t position, int32_t num_inputs) override {
    const auto descs = descs_of(Tensors(all.begin(), all.begin() + position + 1));  // what follows is not there to see
    return plugin_->supportsFormatCombination(position, descs.data(), num_inputs,
                                              static_cast<int32_t>(all.size()) - num_inputs);
  }
  bool configure(const Tensors& in, const Tensors& out) override {
    const auto ins = dynamic_descs_of(in), outs = dynamic_descs_of(out);
    plugin_->configurePlugin(ins.data(), static_cast<int32_t>(ins.size()), outs.data(),
                             static_cast<int32_t>(outs.size()));
    return true;
  }
  bool change_shapes(const Tensors& in, const Tensors& out) override {
    if (plugin_->initialize() != 0) return false;
    return configure(in, out);
  }
  size_t workspace_bytes(const Tensors& in, const Tensors& out) override {
    Tensors max_in = in, max_out = out;
    for (Tensors* list : {&max_in, &max_out}) {
      for (Tensor& tensor : *list) {
        if (!tensor.max_sizes.empty()) tensor.sizes = tensor.max_sizes;
      }
    }
    const auto ins = descs_of(max_in), outs = descs_of(max_out);
    return plugin_->getWorkspaceSize(ins.data(), static_cast<int32_t>(ins.size()), outs.data(),
                                     static_cast<int32_t>(outs.size()));
  }
  std::vector<char> serialize() override {
    std::vector<char> bytes(plugin_->getSerializationSize());
    plugin_->serialize(bytes.data());
    return bytes;
  }
  int32_t num_outputs() override { return plugin_->getNbOutputs(); }
  int32_t aliased_input(int32_t) override { return -2; }
  int32_t enqueue(const Tensors& in, const Tensors& out, const std::vector<const void*>& inputs,
                  const std::vector<void*>& outputs, void* workspace, cudaStream_t stream) override {
    const auto ins = descs_of(in), outs = descs_of(out);
    return plugin_->enqueue(ins.data(), outs.data(), inputs.data(), outputs.data(), workspace, stream);
  }

 private:
  IPluginV2DynamicExt* plugin_;
};

std::unique_ptr<Plugin> wrap(IPluginV2* plugin) {
  return plugin == nullptr ? nullptr : std::make_unique<PluginV2>(plugin);
}

}  // namespace

std::unique_ptr<Plugin> create(const std::string& name, const std::vector<Field>& fields) {
  const auto list = plugin_fields(fields);
  const PluginFieldCollection collection = {static_cast<int32_t>(list.size()), list.data()};
  return wrap(creator_of(name)->createPlugin("node", &collection));
}

std::unique_ptr<Plugin> deserialize(const std::string& name, const std::vector<char>& bytes) {
  return wrap(creator_of(name)->deserializePlugin("node", bytes.data(), bytes.size()));
}

std::vector<std::string> field_names(const std::string& name) {
  std::vector<std::string> names;
  IPluginCreator* creator = creator_of(name);
  for (int32_t i = 0; creator != nullptr && i < creator->getFieldNames()->nbFields; ++i) {
    names.emplace_back(creator->getFieldNames()->fields[i].name);
  }
  return names;
}

}  // namespace driver

#endif
