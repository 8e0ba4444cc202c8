// Messages to TensorRT's logger: the one given by whoever loaded the library, else TensorRT's own, else stderr.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace trt_eagle3 {

using Severity = nvinfer1::ILogger::Severity;

void log(Severity severity, const std::string& message) noexcept;
void set_logger(nvinfer1::ILogger* logger) noexcept;
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// A symbol of this process's TensorRT that has our plugin interfaces, or null if it has none.
void* tensorrt_symbol(const char* name) noexcept;

}  // namespace trt_eagle3
