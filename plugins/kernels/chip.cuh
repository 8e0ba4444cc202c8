// What a launcher wants to know of the current device.
#pragma once

#include <cuda_runtime.h>

namespace trt_eagle3 {

struct Chip {
  int device = 0, major = 0, sms = 0, shared_bytes = 0;

  // Without a GPU the widest there is, so that what is planned for it is enough on any: TensorRT for RTX builds engines
  // there. Nothing can be launched then.
  static cudaError_t current(Chip* chip) {
    cudaError_t error = cudaGetDevice(&chip->device);
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
      cudaGetLastError();
      *chip = widest();
      return cudaSuccess;
    }
    const int device = chip->device;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&chip->major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&chip->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&chip->sms, cudaDevAttrMultiProcessorCount, device);
    return error;
  }

  // 192 multiprocessors are all of GB202. Of major 8, because from 9 on a part of shared memory is left to the cache.
  static Chip widest() { return {-1, 8, 192, 227 << 10}; }
};

// wgmma exists where SM90a code was built, on the chips that it was built for.
inline bool has_wgmma([[maybe_unused]] const Chip& chip) {
#ifdef TRT_EAGLE3_SM90A
  return chip.major == 9;
#else
  return false;
#endif
}

}  // namespace trt_eagle3
