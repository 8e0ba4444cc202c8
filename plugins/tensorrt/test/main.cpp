// trt_eagle3_plugin_test LIBRARY [--host [CUBLAS]]: drives every plugin of the library as TensorRT would. --host leaves
// the GPU alone; CUBLAS stands in for libcublas there. Exit 0: all held; 1: something failed.
#include <dlfcn.h>

#include <cstring>

#include "cases.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::printf("usage: %s LIBRARY [--host [CUBLAS]]\n", argv[0]);
    return 1;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  const auto init = reinterpret_cast<bool (*)(void*, const char*)>(dlsym(library, "initTrtEagle3Plugins"));
  const auto status = reinterpret_cast<const char* (*)()>(dlsym(library, "trtEagle3PluginsStatus"));
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library, "trtEagle3PluginsTensorRTVersion"));
  const bool complete = init != nullptr && status != nullptr && version != nullptr;
  cases::check(complete, "the library exports its functions");
  if (!complete) return 1;
  cases::check(version() / 10000 == NV_TENSORRT_MAJOR, "the library says which TensorRT it is for");
  cases::check(*status() == '\0', std::string("registered: ") + status());
  cases::check(init(nullptr, "") && stand_in::creators().size() == 14, "registering twice changes nothing");
  cases::check(!init(nullptr, "elsewhere"), "another namespace is refused");
  stand_in::take_log();
  const bool host_only = argc > 2 && std::strcmp(argv[2], "--host") == 0;
  if (host_only && argc > 3) cases::run_cublas_cases(argv[3]);  // first: it wants to see a process without any handle
  cases::run_host_cases();
  const bool gpu = !host_only && cases::run_gpu_cases();
  std::printf("TensorRT %d.%d headers: %d checks, %d failed%s\n", NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR, cases::checked,
              cases::failed, gpu ? "" : " (no launches)");
  return cases::failed != 0;
}
