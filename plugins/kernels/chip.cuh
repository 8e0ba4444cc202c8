// What a launcher wants to know of the current device.
#pragma once

#include <cuda_runtime.h>

namespace trt_eagle3 {

struct Chip {
  int device = 0, major = 0, sms = 0, shared_bytes = 0;

  static cudaError_t current(Chip* chip) {
    cudaError_t error = cudaGetDevice(&chip->device);
    const int device = chip->device;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&chip->major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&chip->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&chip->sms, cudaDevAttrMultiProcessorCount, device);
    return error;
  }
};

}  // namespace trt_eagle3
