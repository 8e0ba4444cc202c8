// How many clusters of blocks a chip holds.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "chip.cuh"

namespace trt_eagle3 {

constexpr int kMaxCluster = 8;  // blocks

// How many clusters of a size of a kernel the chip runs at once, a block on a multiprocessor. `known`: what this thread
// has asked of this kernel before.
struct ClusterRoom {
  int device = -1, clusters[kMaxCluster + 1] = {};
};

template <typename... Parameters>
cudaError_t cluster_room(void (*kernel)(Parameters...), const Chip& chip, int threads, int size, ClusterRoom* known,
                         int* clusters) {
  *clusters = chip.sms / size;
  if (size == 1) return cudaSuccess;
  if (known->device != chip.device) *known = ClusterRoom{};
  known->device = chip.device;
  int& room = known->clusters[size];
  if (room == 0) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size, *clusters);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = chip.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&room, kernel, &config); error != cudaSuccess) {
      return error;
    }
  }
  *clusters = std::min(*clusters, room);
  return *clusters > 0 ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace trt_eagle3
