// cuBLAS, for the products that linear() does not take. Neither its headers nor the library are needed to build: it is
// found at run time, among the process's symbols, then as libcublas.so.13, .12 or .11.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "../kernels/params.h"

namespace trt_eagle3 {

// Makes the current device's handle, which then lives as long as the process. Not while a stream is being captured, so
// never in a launch; cheap when there is one already. Where it cannot be made, cublas_linear() says why.
void make_cublas_handle();

// Bytes of workspace that NVIDIA advises for cuBLAS on the current device.
size_t cublas_workspace_bytes();

// y = x . weight^T for any sizes, with sums in float32; "", or why not. May be captured; contexts on several threads
// and streams may call at once, each with a workspace of its own.
std::string cublas_linear(const LinearParams& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

}  // namespace trt_eagle3
