// Loads a TensorRT and our plugin library as a process does, and makes a plugin by that TensorRT's own registry.
// usage: registry_case TENSORRT PLUGINS; prints a line per fact.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>

#include "../capi/lists.h"

using namespace nvinfer1;

namespace {

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

void make(IPluginRegistry* registry, const char* name) {
  IPluginCreatorInterface* found = registry->getCreator(name, TE3_PLUGIN_VERSION, "");
  if (found == nullptr) {
    std::printf("%s: no creator\n", name);
    return;
  }
  auto* creator = static_cast<IPluginCreatorV3One*>(found);
  const int32_t type = 10;
  const PluginField given[] = {PluginField("compute_type", &type, PluginFieldType::kINT32, 1),
                               PluginField("scale_type", &type, PluginFieldType::kINT32, 1)};
  PluginFieldCollection fields;
  fields.nbFields = 2;
  fields.fields = given;
  IPluginV3* plugin = creator->createPlugin(name, &fields, TensorRTPhase::kBUILD);
  if (plugin == nullptr) {
    std::printf("%s: refused\n", name);
    return;
  }
  auto* core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
  auto* build = static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
  const InterfaceInfo info = build->getInterfaceInfo();
  std::printf("%s: %s version %s, %d output, %s %d\n", name, core->getPluginName(), core->getPluginVersion(),
              build->getNbOutputs(), info.kind, info.major);
  delete plugin;
}

}  // namespace

int main(int, char** arguments) {
  void* tensorrt = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (tensorrt == nullptr) return std::printf("%s\n", dlerror()), 1;
  std::printf("version %d\n", symbol<int32_t (*)()>(tensorrt, "getInferLibVersion")());
  void* plugins = dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL);
  if (plugins == nullptr) return std::printf("%s\n", dlerror()), 1;
  std::printf("status '%s'\n", symbol<const char* (*)()>(plugins, "trtEagle3PluginsStatus")());
  int32_t left = -1;
  symbol<IPluginCreatorInterface* const* (*)(int32_t&)>(plugins, "getCreators")(left);
  std::printf("left to register %d\n", left);
  auto* registry = symbol<IPluginRegistry* (*)()>(tensorrt, "getPluginRegistry")();
  make(registry, "PickRows");
  make(registry, "Linear");
  make(registry, "LinearFp8");
  make(registry, "LinearInt8");
  make(registry, "LinearInt4");
  make(registry, "TreeAttention");  // attributes that it needs are missing
  make(registry, "Abacus");
}
