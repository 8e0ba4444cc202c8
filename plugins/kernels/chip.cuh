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

// wgmma exists where SM90a code was built, on the chips that it was built for.
inline bool has_wgmma(const Chip& chip) {
#ifdef TRT_EAGLE3_SM90A
  return chip.major == 9;
#else
  return false;
#endif
}

}  // namespace trt_eagle3
