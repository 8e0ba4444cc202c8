#include "stand_in.h"

#include <deque>

using namespace nvinfer1;

namespace stand_in {
namespace {

std::vector<Creator*> registered;
std::string logged;

class Logger final : public ILogger {
 public:
  void log(Severity, const char* message) noexcept override { logged += std::string(message) + "\n"; }
};

class Registry final : public IPluginRegistry {
 public:
  ~Registry() noexcept override = default;
  bool registerCreator(Creator& creator, const char* name) noexcept override {
    if (std::string(name) != "") return false;
    for (Creator* other : registered) {
      if (other == &creator) return false;
    }
    registered.push_back(&creator);
    return true;
  }
  bool deregisterCreator(const Creator&) noexcept override { return false; }
  bool isParentSearchEnabled() const override { return true; }
  void setParentSearchEnabled(bool) override {}
  PluginLibraryHandle loadLibrary(const char*) noexcept override { return nullptr; }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  void setErrorRecorder(IErrorRecorder*) noexcept override {}
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
#if NV_TENSORRT_MAJOR >= 10
  Creator* const* getAllCreators(int32_t* count) const noexcept override { return list(count); }
  // no override: the first 10 does not have it
  virtual Creator* const* getAllCreatorsRecursive(int32_t* count) noexcept { return list(count); }
  Creator* getCreator(const char*, const char*, const char*) noexcept override { return nullptr; }
  IPluginResource* acquirePluginResource(const char*, IPluginResource*) noexcept override { return nullptr; }
  int32_t releasePluginResource(const char*) noexcept override { return 1; }
#else
  Creator* const* getPluginCreatorList(int32_t* count) const noexcept override { return list(count); }
  Creator* getPluginCreator(const char*, const char*, const char*) noexcept override { return nullptr; }
#endif
#if NV_TENSORRT_MAJOR == 10
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // 10 has both generations
  bool registerCreator(IPluginCreator&, const char*) noexcept override { return false; }
  bool deregisterCreator(const IPluginCreator&) noexcept override { return false; }
  IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept override { return *count = 0, nullptr; }
  IPluginCreator* getPluginCreator(const char*, const char*, const char*) noexcept override { return nullptr; }
#pragma GCC diagnostic pop
#endif

 private:
  static Creator* const* list(int32_t* count) {
    *count = static_cast<int32_t>(registered.size());
    return registered.data();
  }
};

using Size = std::remove_const_t<decltype(std::declval<const IDimensionExpr>().getConstantValue())>;

class Expression final : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  explicit Expression(int64_t value) : value_(value) { mImpl = this; }
  ~Expression() noexcept override = default;
  int64_t value() const { return value_; }

 private:
  bool isConstant() const override { return value_ >= 0; }
  Size getConstantValue() const override { return static_cast<Size>(value_); }
#if NV_TENSORRT_MAJOR >= 10
  bool isSizeTensor() const override { return false; }
#endif
  int64_t value_;
};

}  // namespace

struct Expressions::State final : public IExprBuilder, private apiv::VExprBuilder {
  State() { mImpl = this; }
  ~State() noexcept override = default;
  const IDimensionExpr* constant(Size value) override { return &owned.emplace_back(value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) override {
    const int64_t x = static_cast<const Expression&>(a).value(), y = static_cast<const Expression&>(b).value();
    if (op == DimensionOperation::kPROD) return &owned.emplace_back(x >= 0 && y >= 0 ? x * y : dynamic--);
    if (op == DimensionOperation::kSUM) return &owned.emplace_back(x >= 0 && y >= 0 ? x + y : dynamic--);
    if (op == DimensionOperation::kMIN) return &owned.emplace_back(x >= 0 && y >= 0 ? std::min(x, y) : dynamic--);
    if (op == DimensionOperation::kFLOOR_DIV) return &owned.emplace_back(x >= 0 && y > 0 ? x / y : dynamic--);
    return nullptr;  // our shapes need no other
  }
#if NV_TENSORRT_MAJOR >= 10
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr& opt, const IDimensionExpr&) override {
    return &opt;
  }
#endif
  std::deque<Expression> owned;
  int64_t dynamic = kDynamic;
};

Expressions::Expressions() : state_(std::make_unique<State>()) {}
Expressions::~Expressions() = default;

IExprBuilder& Expressions::builder() { return *state_; }

DimsExprs Expressions::make(const std::vector<int64_t>& sizes) {
  DimsExprs shape = {};
  for (const int64_t size : sizes) {
    shape.d[shape.nbDims++] = &state_->owned.emplace_back(size == kDynamic ? state_->dynamic-- : size);
  }
  return shape;
}

std::vector<int64_t> Expressions::read(const DimsExprs& shape) {
  std::vector<int64_t> sizes;
  for (int32_t i = 0; i < shape.nbDims; ++i) sizes.push_back(static_cast<const Expression*>(shape.d[i])->value());
  return sizes;
}

const std::vector<Creator*>& creators() { return registered; }

std::string take_log() {
  std::string taken;
  taken.swap(logged);
  return taken;
}

}  // namespace stand_in

// The three symbols of libnvinfer that the library looks up.
extern "C" __attribute__((visibility("default"))) IPluginRegistry* getPluginRegistry() noexcept {
  static stand_in::Registry registry;
  return &registry;
}
extern "C" __attribute__((visibility("default"))) ILogger* getLogger() noexcept {
  static stand_in::Logger logger;
  return &logger;
}
extern "C" __attribute__((visibility("default"))) int32_t getInferLibVersion() noexcept { return NV_TENSORRT_VERSION; }
