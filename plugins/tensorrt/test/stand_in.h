// Stands in for libnvinfer: its registry, logger and shape expressions, as far as plugins see them.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace stand_in {

#if NV_TENSORRT_MAJOR >= 10
using Creator = nvinfer1::IPluginCreatorInterface;
#else
using Creator = nvinfer1::IPluginCreator;
#endif

// What was registered, in order.
const std::vector<Creator*>& creators();

// What was logged since the last call, joined with newlines.
std::string take_log();

constexpr int64_t kDynamic = -1;

// Makes shape expressions and reads them back. A dynamic size becomes an expression of its own, known by `kDynamic -
// i`.
class Expressions {
 public:
  Expressions();
  ~Expressions();
  nvinfer1::IExprBuilder& builder();
  nvinfer1::DimsExprs make(const std::vector<int64_t>& sizes);
  // Sizes; a dynamic one as the (negative) number that make() gave it.
  static std::vector<int64_t> read(const nvinfer1::DimsExprs& shape);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stand_in
