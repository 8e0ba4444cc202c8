// How the copy engine is told of a tensor.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "params.h"

namespace trt_eagle3 {

// The driver's function that describes a tensor to the copy engine; null where it has none.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encoder);
}

// A tensor [rows, columns] of numbers of `size` bytes in boxes of `box_rows` by 128 bytes, swizzled as wgmma wants them.
// Rows past the last come as zeros.
inline cudaError_t describe_boxes(CUtensorMapDataType type, int size, const void* data, int rows, int columns,
                                  int box_rows, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns) * size};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Of 16-bit numbers.
inline cudaError_t describe_rows(DType dtype, const void* data, int rows, int columns, int box_rows, CUtensorMap* map) {
  const auto type = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return describe_boxes(type, 2, data, rows, columns, box_rows, map);
}

// Experts' weights [experts, 2 * width, columns] of 16-bit numbers, gate first, as [experts, width / 8, 2, 8, columns], so
// that a box of 64 columns and box_eights has 8 gate rows, the same 8 up rows, the next 8 gate rows, and so on.
inline cudaError_t describe_gate_up(DType dtype, const void* data, int experts, int width, int columns, int box_eights,
                                    CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto type = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto size = [](int n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t row = size(columns) * 2, sizes[] = {size(columns), 8, 2, size(width / 8), size(experts)};
  const cuuint64_t strides[] = {row, row * width, row * 8, row * 2 * width};
  const cuuint32_t box[] = {64, 8, 2, static_cast<cuuint32_t>(box_eights), 1}, steps[] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Of bytes.
inline cudaError_t describe_byte_rows(const void* data, int rows, int columns, int box_rows, CUtensorMap* map) {
  return describe_boxes(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, columns, box_rows, map);
}

}  // namespace trt_eagle3
