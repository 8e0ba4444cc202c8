#include "log.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>

namespace trt_eagle3 {
namespace {

std::atomic<nvinfer1::ILogger*> given_logger{nullptr};
std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

nvinfer1::ILogger* find_logger() noexcept {
  if (nvinfer1::ILoggerFinder* finder = logger_finder.load(); finder != nullptr) {
    if (nvinfer1::ILogger* logger = finder->findLogger(); logger != nullptr) return logger;
  }
  if (nvinfer1::ILogger* logger = given_logger.load(); logger != nullptr) return logger;
  const auto get_logger = reinterpret_cast<nvinfer1::ILogger* (*)()>(tensorrt_symbol("getLogger"));
  return get_logger != nullptr ? get_logger() : nullptr;
}

// TensorRT for RTX counts as TensorRT does from 10 on, 10000 * major + 100 * minor + patch, but began with 1.
constexpr int32_t kFirstRtx = 10000, kFirstTen = 100000;
constexpr int32_t kRtxMajor = 1, kRtxInterfaces = 11;  // the TensorRT whose plugin interfaces it has

// Has this library the plugin interfaces that we were compiled against? TensorRT's numbers are 1000 * major up to 8,
// 10000 * major from 10 on.
bool is_ours(void* library) {
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  if (version == nullptr) return false;
  const int32_t number = version();
  if (number >= kFirstTen) return number / 10000 == NV_TENSORRT_MAJOR;
  if (number >= kFirstRtx) return number / 10000 == kRtxMajor && NV_TENSORRT_MAJOR == kRtxInterfaces;
  return number / 1000 == NV_TENSORRT_MAJOR;
}

// False if there is none. The library may be RTLD_DEFAULT, which is a null pointer. Nothing is loaded: a TensorRT found
// on the system's path could be another one than the one that the process loads next.
bool find_library(void** library) {
  *library = RTLD_DEFAULT;
  if (is_ours(*library)) return true;
  const std::string major = "." + std::to_string(NV_TENSORRT_MAJOR), rtx = "." + std::to_string(kRtxMajor);
  for (const std::string& name : {"libnvinfer.so" + major, "libnvinfer_lean.so" + major,
                                  "libnvinfer_dispatch.so" + major, "libtensorrt_rtx.so" + rtx}) {
    *library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (*library != nullptr && is_ours(*library)) return true;
  }
  return false;
}

}  // namespace

void* tensorrt_symbol(const char* name) noexcept {
  static std::atomic<void*> found{nullptr};
  static std::atomic<bool> is_found{false};  // looked for again until found: TensorRT may be loaded later
  if (!is_found) {
    void* library = nullptr;
    if (!find_library(&library)) return nullptr;
    found = library;
    is_found = true;
  }
  return dlsym(found, name);
}

void set_logger(nvinfer1::ILogger* logger) noexcept { given_logger = logger; }
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder = finder; }

void log(Severity severity, const std::string& message) noexcept {
  const std::string line = "trt_eagle3: " + message;
  if (nvinfer1::ILogger* logger = find_logger(); logger != nullptr) {
    logger->log(severity, line.c_str());
  } else if (severity <= Severity::kWARNING) {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

}  // namespace trt_eagle3
