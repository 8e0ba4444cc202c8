// What the library exports, and how its creators reach TensorRT's registry: by themselves when it is loaded.
#include <atomic>
#include <mutex>
#include <string>

#include "adapter.h"
#include "log.h"

#define TRT_EAGLE3_EXPORT extern "C" __attribute__((visibility("default")))

namespace trt_eagle3 {
namespace {

std::mutex mutex;
bool registered = false;
std::string status = "not registered yet";

// Puts the creators into the registry, once. A creator of the same name that is there already keeps its place.
bool register_creators() noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  if (registered) return true;
  const auto get_registry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(tensorrt_symbol("getPluginRegistry"));
  nvinfer1::IPluginRegistry* registry = get_registry != nullptr ? get_registry() : nullptr;
  if (registry == nullptr) {
    status = "no TensorRT " + std::to_string(NV_TENSORRT_MAJOR) +
             ", for which these plugins were built, is in this process. Load TensorRT first";
    return false;
  }
  for (Creator* creator : creators()) {
    if (registry->registerCreator(*creator, "")) continue;
    status = "TensorRT refused to register the plugins. Is another copy of this library loaded?";
    log(Severity::kERROR, status);
    return false;
  }
  registered = true;
  status.clear();
  return true;
}

// Fails quietly where TensorRT is not loaded yet: initTrtEagle3Plugins() tries again and tells.
[[maybe_unused]] const bool registered_at_load = register_creators();

}  // namespace
}  // namespace trt_eagle3

// Registers the creators if loading the library did not. `logger` (nvinfer1::ILogger*) may be null; the namespace must
// be null or "". False if they are not registered: trtEagle3PluginsStatus() says why.
TRT_EAGLE3_EXPORT bool initTrtEagle3Plugins(void* logger, const char* plugin_namespace) {
  using namespace trt_eagle3;
  if (logger != nullptr) set_logger(static_cast<nvinfer1::ILogger*>(logger));
  if (plugin_namespace != nullptr && *plugin_namespace != '\0') {
    log(Severity::kERROR, std::string("the plugins live in namespace \"\", not in \"") + plugin_namespace + "\"");
    return false;
  }
  return register_creators();
}

// Why the creators are not registered; "" once they are. Good until the next call.
TRT_EAGLE3_EXPORT const char* trtEagle3PluginsStatus() {
  const std::lock_guard<std::mutex> lock(trt_eagle3::mutex);
  thread_local std::string copy;
  copy = trt_eagle3::status;
  return copy.c_str();
}

// The TensorRT whose headers this was built with: 10000 * major + 100 * minor + patch. The major version must agree.
TRT_EAGLE3_EXPORT int32_t trtEagle3PluginsTensorRTVersion() {
  return NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100 + NV_TENSORRT_PATCH;
}

// For IPluginRegistry::loadLibrary (trtexec --dynamicPlugins). It registers what getCreators returns, and fails if that
// is registered already: so whatever this library registered when it was loaded is not returned.
TRT_EAGLE3_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { trt_eagle3::set_logger_finder(finder); }

#if NV_TENSORRT_MAJOR >= 10
TRT_EAGLE3_EXPORT trt_eagle3::Creator* const* getCreators(int32_t& count)
#else
TRT_EAGLE3_EXPORT trt_eagle3::Creator* const* getPluginCreators(int32_t& count)
#endif
{
  const std::lock_guard<std::mutex> lock(trt_eagle3::mutex);
  const auto& creators = trt_eagle3::creators();
  count = trt_eagle3::registered ? 0 : static_cast<int32_t>(creators.size());
  return creators.data();
}
