// Checks of C arguments. The first failure is kept as a message; later ones are not looked at.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>
#include <type_traits>

#include "trt_eagle3.h"

namespace trt_eagle3 {

constexpr int64_t kAny = -1;  // in an expected shape: any size

class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  te3_status status() const { return status_; }
  const std::string& message() const { return message_; }
  bool ok() const { return status_ == TE3_OK; }

  // Present, of this dtype and shape, with data aligned to 16 bytes (4 for int32, 1 for bool and uint8).
  void tensor(const char* name, const te3_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape,
              const char* layout) {
    shape_of(name, t, dtype, shape, layout);
    data_of(name, t);
  }

  // As tensor(), but the data may be null.
  void shape_of(const char* name, const te3_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape,
                const char* layout) {
    if (!ok()) return;
    if (t.dtype != dtype) {
      return fail(std::string(name) + ": expected " + dtype_name(dtype) + ", got " + dtype_name(t.dtype));
    }
    bool same = t.rank == static_cast<int32_t>(shape.size());
    int axis = 0;
    for (const int64_t size : shape) {
      same = same && t.shape[axis] >= 0 && (size == kAny || size == t.shape[axis]);
      ++axis;
    }
    if (!same) fail(std::string(name) + ": expected " + layout + " = " + text(shape) + ", got " + text(t));
  }

  void data_of(const char* name, const te3_tensor& t) {
    if (!ok()) return;
    if (t.data == nullptr) return fail(std::string(name) + ": data is null");
    const uintptr_t alignment = t.dtype == TE3_BOOL || t.dtype == TE3_UINT8 ? 1 : t.dtype == TE3_INT32 ? 4 : 16;
    if (reinterpret_cast<uintptr_t>(t.data) % alignment != 0) {
      fail(std::string(name) + ": data must be aligned to " + std::to_string(alignment) + " bytes");
    }
  }

  void floating(const char* name, const te3_tensor& t) {
    if (t.dtype < TE3_FLOAT32 || t.dtype > TE3_BFLOAT16) {
      fail(std::string(name) + ": expected float32, float16 or bfloat16, got " + dtype_name(t.dtype));
    }
  }

  // `otherwise`: a text, or what makes one; made only where it is needed, for checks stand in the way of every launch.
  template <typename Text>
  void that(bool holds, const Text& otherwise) {
    if (holds) return;
    if constexpr (std::is_invocable_v<Text>) {
      fail(otherwise());
    } else {
      fail(otherwise);
    }
  }

  void workspace(const void* data, size_t bytes, size_t wanted) {
    that(wanted <= bytes && (wanted == 0 || reinterpret_cast<uintptr_t>(data) % 16 == 0), [&] {
      return "workspace: expected " + std::to_string(wanted) + " bytes aligned to 16, got " + std::to_string(bytes);
    });
  }

  // On the current device, each of `count` pointers that is not null. Comes last: it is the one check that needs a
  // device.
  void on_device(const void* const* pointers, int count) {
    if (!ok()) return;
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
      return fail(std::string("no CUDA device: ") + cudaGetErrorString(error), TE3_WRONG_DEVICE);
    }
    for (int i = 0; i < count; ++i) {
      const void* pointer = pointers[i];
      if (pointer == nullptr) continue;
      cudaPointerAttributes attributes;
      if (const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer); error != cudaSuccess) {
        cudaGetLastError();
        return fail(std::string("no CUDA device: ") + cudaGetErrorString(error), TE3_WRONG_DEVICE);
      }
      const bool usable = attributes.type == cudaMemoryTypeManaged ||
                          (attributes.type == cudaMemoryTypeDevice && attributes.device == device);
      if (!usable) {
        return fail("expected memory of CUDA device " + std::to_string(device) + ", got memory of the host or another",
                    TE3_WRONG_DEVICE);
      }
    }
  }

  void launched(cudaError_t error) {
    if (!ok() || error == cudaSuccess) return;
    cudaGetLastError();  // told here, and not to the next launch that asks
    const bool unsupported = error == cudaErrorNotSupported;
    const bool foreign = error == cudaErrorNoKernelImageForDevice;
    fail(unsupported ? "no kernel for these arguments on this device"
         : foreign   ? "this library was built for other GPUs. Build it with -DTRT_EAGLE3_ARCHITECTURES=native"
                     : cudaGetErrorString(error),
         unsupported ? TE3_NOT_SUPPORTED : TE3_CUDA_ERROR);
  }

  static std::string text(const te3_tensor& t) {
    std::string s = "[";
    for (int32_t i = 0; i < t.rank && i < TE3_MAX_RANK; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
    return s + "]";
  }

 private:
  void fail(const std::string& what, te3_status status = TE3_INVALID_ARGUMENT) {
    if (!ok()) return;
    status_ = status;
    message_ = std::string(op_) + ": " + what;
  }

  static std::string text(std::initializer_list<int64_t> shape) {
    std::string s = "[";
    for (const int64_t size : shape) s += (s.size() > 1 ? ", " : "") + (size == kAny ? "any" : std::to_string(size));
    return s + "]";
  }

  static const char* dtype_name(int32_t dtype) {
    static const char* const names[] = {"float32", "float16", "bfloat16", "int32", "bool", "float8_e4m3fn", "uint8"};
    return dtype >= 0 && dtype <= TE3_UINT8 ? names[dtype] : "an unknown dtype";
  }

  const char* op_;
  te3_status status_ = TE3_OK;
  std::string message_;
};

}  // namespace trt_eagle3
