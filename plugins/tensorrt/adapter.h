// The adapter of the TensorRT that this library is compiled against (adapter_v2.cpp or adapter_v3.cpp).
#pragma once

#include <NvInferRuntime.h>

#include <vector>

namespace trt_eagle3 {

#if NV_TENSORRT_MAJOR >= 10
using Creator = nvinfer1::IPluginCreatorInterface;
#else
using Creator = nvinfer1::IPluginCreator;
#endif

// One per description, alive as long as the library.
const std::vector<Creator*>& creators();

}  // namespace trt_eagle3
