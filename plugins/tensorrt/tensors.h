// TensorRT's tensors as those of the C interface, whose checks and parameters every launch goes through.
#pragma once

#include "../capi/arguments.h"
#include "description.h"

namespace trt_eagle3 {

inline int32_t te3_dtype_of(DataType type) {
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kBF16) return TE3_BFLOAT16;
#endif
  switch (type) {
    case DataType::kFLOAT:
      return TE3_FLOAT32;
    case DataType::kHALF:
      return TE3_FLOAT16;
    case DataType::kINT32:
      return TE3_INT32;
    case DataType::kBOOL:
      return TE3_BOOL;
    default:
      return -1;
  }
}

inline te3_tensor tensor_of(const nvinfer1::PluginTensorDesc& desc, const void* data) {
  te3_tensor tensor = {};
  tensor.data = const_cast<void*>(data);
  tensor.dtype = te3_dtype_of(desc.type);
  tensor.rank = desc.dims.nbDims;
  for (int32_t i = 0; i < tensor.rank && i < TE3_MAX_RANK; ++i) tensor.shape[i] = desc.dims.d[i];
  return tensor;
}

inline te3_tensor input_of(const Call& call, int32_t i) { return tensor_of(call.in_desc[i], call.in[i]); }
inline te3_tensor output_of(const Call& call, int32_t i) { return tensor_of(call.out_desc[i], call.out[i]); }

}  // namespace trt_eagle3
