// The plugin interfaces of TensorRT 11 and TensorRT for RTX 1.7, as far as this library meets them.
//
// Written from the API documentation; where that does not tell the order of virtual functions, it is that of the
// public headers of 11.1. For machines without TensorRT's headers: the wheels of TensorRT for RTX bring none. Where you
// have NVIDIA's, compile against those. The virtual functions of a class stand in the order of its virtual table, all of
// them; of enumerations there are the values that are asked for. tests/engine/trt/test_rtx_builder.py has the builder of TensorRT for
// RTX and TensorRT's registry take what is compiled against this.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#define NV_TENSORRT_MAJOR 11
#define NV_TENSORRT_MINOR 1
#define NV_TENSORRT_PATCH 0
#define NV_TENSORRT_VERSION (NV_TENSORRT_MAJOR * 10000L + NV_TENSORRT_MINOR * 100L + NV_TENSORRT_PATCH * 1L)

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT8 = 2, kINT32 = 3, kBOOL = 4, kBF16 = 7, kINT64 = 8 };
enum class TensorFormat : int32_t { kLINEAR = 0, kCHW2 = 1, kHWC8 = 2, kCHW4 = 3, kCHW16 = 4, kCHW32 = 5 };
enum class PluginFieldType : int32_t { kFLOAT32 = 1, kFLOAT64 = 2, kINT32 = 5, kCHAR = 6, kUNKNOWN = 8, kINT64 = 10 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class DimensionOperation : int32_t { kSUM = 0, kPROD = 1, kMIN = 3, kFLOOR_DIV = 7, kCEIL_DIV = 8 };
enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };

// Shapes and tensors

struct Dims64 {
  static constexpr int32_t MAX_DIMS = 8;
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

// What an object of TensorRT's own is made of: a pointer to what does the work, behind a virtual table.
class INoCopy {
 public:
  INoCopy(const INoCopy&) = delete;
  INoCopy& operator=(const INoCopy&) = delete;

 protected:
  INoCopy() = default;
  virtual ~INoCopy() = default;
};

class IDimensionExpr;

namespace apiv {

class VRoot {
 public:
  virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot {
 public:
  virtual bool isConstant() const = 0;
  virtual int64_t getConstantValue() const = 0;
  virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot {
 public:
  virtual const IDimensionExpr* constant(int64_t value) = 0;
  virtual const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) = 0;
  virtual const IDimensionExpr* declareSizeTensor(int32_t output, const IDimensionExpr& best,
                                                  const IDimensionExpr& most) = 0;
};

}  // namespace apiv

class IDimensionExpr : public INoCopy {
 public:
  bool isConstant() const noexcept { return mImpl->isConstant(); }
  int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

 protected:
  ~IDimensionExpr() noexcept override = 0;
  apiv::VDimensionExpr* mImpl;
};
inline IDimensionExpr::~IDimensionExpr() noexcept = default;

class IExprBuilder : public INoCopy {
 public:
  const IDimensionExpr* constant(int64_t value) noexcept { return mImpl->constant(value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) noexcept {
    return mImpl->operation(op, a, b);
  }

 protected:
  ~IExprBuilder() noexcept override = 0;
  apiv::VExprBuilder* mImpl;
};
inline IExprBuilder::~IExprBuilder() noexcept = default;

struct DimsExprs {
  int32_t nbDims;
  const IDimensionExpr* d[Dims::MAX_DIMS];
};

// A node's attributes

struct PluginField {
  const AsciiChar* name;
  const void* data;
  PluginFieldType type;
  int32_t length;

  PluginField(const AsciiChar* field_name = nullptr, const void* value = nullptr,
              PluginFieldType value_type = PluginFieldType::kUNKNOWN, int32_t count = 0) noexcept
      : name(field_name), data(value), type(value_type), length(count) {}
};

struct PluginFieldCollection {
  int32_t nbFields = 0;
  const PluginField* fields = nullptr;
};

// Interfaces, each of which says its kind and version

struct InterfaceInfo {
  const char* kind;
  int32_t major, minor;
};

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;

 protected:
  IVersionedInterface() = default;
  IVersionedInterface(const IVersionedInterface&) = default;
  IVersionedInterface& operator=(const IVersionedInterface&) & = default;
};

class IPluginResourceContext;

namespace v_1_0 {

class IErrorRecorder;
class IPluginResource;

class ILogger : public IVersionedInterface {
 public:
  enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };

  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
  virtual void log(Severity severity, const AsciiChar* message) noexcept = 0;
};

class ILoggerFinder : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
  virtual ILogger* findLogger() = 0;
};

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual const AsciiChar* getPluginName() const noexcept = 0;
  virtual const AsciiChar* getPluginVersion() const noexcept = 0;
  virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

// Functions that return int32_t return 0 where all is well, but for counts.
class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_in, const DynamicPluginTensorDesc* out,
                                  int32_t num_out) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* out, int32_t num_out, const DataType* in,
                                     int32_t num_in) const noexcept = 0;
  virtual int32_t getOutputShapes(const DimsExprs* in, int32_t num_in, const DimsExprs* shape_in, int32_t num_shape_in,
                                  DimsExprs* out, int32_t num_out, IExprBuilder& builder) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* in_out, int32_t num_in,
                                         int32_t num_out) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                                  int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual const char* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual const char* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(const PluginTensorDesc* in, int32_t num_in, const PluginTensorDesc* out,
                                int32_t num_out) noexcept = 0;
  virtual int32_t enqueue(const PluginTensorDesc* in_desc, const PluginTensorDesc* out_desc, const void* const* in,
                          void* const* out, void* workspace, cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3* createPlugin(const AsciiChar* name, const PluginFieldCollection* fields,
                                  TensorRTPhase phase) noexcept = 0;
  virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
  virtual const AsciiChar* getPluginName() const noexcept = 0;
  virtual const AsciiChar* getPluginVersion() const noexcept = 0;
  virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

namespace v_2_0 {

// Adds the input whose memory an output is, or -1.
class IPluginV3OneBuild : public v_1_0::IPluginV3OneBuild {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
  virtual int32_t getAliasedInput(int32_t) noexcept { return -1; }
};

}  // namespace v_2_0

using v_1_0::IErrorRecorder;
using v_1_0::ILogger;
using v_1_0::ILoggerFinder;
using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginResource;
using v_1_0::IPluginV3;
using v_1_0::IPluginV3OneBuild;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;
using IPluginV3OneBuildV2 = v_2_0::IPluginV3OneBuild;

class IPluginRegistry {
 public:
  using PluginLibraryHandle = void*;

  IPluginRegistry() = default;
  IPluginRegistry(const IPluginRegistry&) = delete;
  IPluginRegistry& operator=(const IPluginRegistry&) = delete;

 protected:
  virtual ~IPluginRegistry() noexcept = 0;

 public:
  virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
  virtual bool isParentSearchEnabled() const = 0;
  virtual void setParentSearchEnabled(bool enabled) = 0;
  virtual PluginLibraryHandle loadLibrary(const AsciiChar* path) noexcept = 0;
  virtual void deregisterLibrary(PluginLibraryHandle handle) noexcept = 0;
  virtual bool registerCreator(IPluginCreatorInterface& creator, const AsciiChar* name_space) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
  virtual IPluginCreatorInterface* getCreator(const AsciiChar* name, const AsciiChar* version,
                                              const AsciiChar* name_space = "") noexcept = 0;
  virtual bool deregisterCreator(const IPluginCreatorInterface& creator) noexcept = 0;
  virtual IPluginResource* acquirePluginResource(const AsciiChar* key, IPluginResource* resource) noexcept = 0;
  virtual int32_t releasePluginResource(const AsciiChar* key) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept = 0;
};
inline IPluginRegistry::~IPluginRegistry() noexcept = default;

}  // namespace nvinfer1
