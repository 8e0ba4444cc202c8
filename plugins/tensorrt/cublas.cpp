#include "cublas.h"

#include <dlfcn.h>
#include <library_types.h>

#include <map>
#include <mutex>

namespace trt_eagle3 {
namespace {

// What cublas_v2.h says, the same from version 11 to 13.
using Handle = struct cublasContext*;
using Status = int;
constexpr int kNotTransposed = 0, kTransposed = 1;
constexpr int kComputeFloat32 = 68;     // CUBLAS_COMPUTE_32F
constexpr int kSumsInComputeType = 16;  // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
constexpr int kChoosesAlgorithm = -1;   // CUBLAS_GEMM_DEFAULT

struct Functions {
  Status (*create)(Handle* handle);
  Status (*destroy)(Handle handle);
  Status (*set_math_mode)(Handle handle, int mode);
  Status (*set_stream)(Handle handle, cudaStream_t stream);
  Status (*set_workspace)(Handle handle, void* workspace, size_t bytes);
  Status (*gemm)(Handle handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
                 cudaDataType a_type, int lda, const void* b, cudaDataType b_type, int ldb, const void* beta, void* c,
                 cudaDataType c_type, int ldc, int compute_type, int algorithm);
};

// A handle carries a stream and a workspace from call to call: whoever uses one holds the mutex.
struct State {
  std::mutex mutex;
  bool found = false;
  Functions functions = {};
  std::map<int, Handle> handles;  // by device
  std::string reason = "none of its plugins was made ready on this device";
};

// Never destroyed: cuBLAS may be gone before this library's own statics are.
State& state() {
  static auto* const only = new State;
  return *only;
}

int current_device() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  cudaGetLastError();
  return -1;  // cublasCreate will say what is wrong
}

template <typename Function>
bool read(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The library may be RTLD_DEFAULT, which is a null pointer.
bool read_functions(void* library, Functions* f) {
  return read(library, "cublasCreate_v2", &f->create) && read(library, "cublasDestroy_v2", &f->destroy) &&
         read(library, "cublasSetMathMode", &f->set_math_mode) && read(library, "cublasSetStream_v2", &f->set_stream) &&
         read(library, "cublasSetWorkspace_v2", &f->set_workspace) && read(library, "cublasGemmEx", &f->gemm);
}

std::string create(const Functions& f, Handle* handle) {
  const Status made = f.create(handle);
  if (made != 0) return "cublasCreate failed with status " + std::to_string(made);
  const Status set = f.set_math_mode(*handle, kSumsInComputeType);
  if (set == 0) return "";
  f.destroy(*handle);
  return "cublasSetMathMode failed with status " + std::to_string(set);
}

// Takes the first library that makes a handle here: those in the process come first, and a newer one on the library
// path may be too new for the driver.
std::string find_and_create(State* s, Handle* handle) {
  std::string reason;
  const auto try_library = [&](void* library) {
    if (!read_functions(library, &s->functions)) return false;
    reason = create(s->functions, handle);
    return reason.empty();
  };
  s->found = try_library(RTLD_DEFAULT);
  for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"}) {
      if (s->found) return "";
      if (void* library = dlopen(name, mode); library != nullptr) s->found = try_library(library);
    }
  }
  if (s->found || !reason.empty()) return s->found ? "" : reason;
  return "no libcublas.so.13, .12 or .11. Install CUDA's cuBLAS and name its folder in LD_LIBRARY_PATH, or import "
         "torch "
         "first, which brings it";
}

cudaDataType data_type(DType dtype) {
  return dtype == DType::kFloat32 ? CUDA_R_32F : dtype == DType::kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
}

}  // namespace

void make_cublas_handle() {
  State& s = state();
  const int device = current_device();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.handles.count(device) > 0) return;
  Handle handle = nullptr;
  s.reason = s.found ? create(s.functions, &handle) : find_and_create(&s, &handle);
  if (s.reason.empty()) s.handles[device] = handle;
}

size_t cublas_workspace_bytes() {
  int major = 0;
  const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current_device()) == cudaSuccess;
  if (!known) cudaGetLastError();
  return size_t{known && major < 9 ? 4u : 32u} << 20;
}

std::string cublas_linear(const LinearParams& p, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  State& s = state();
  const int device = current_device();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.handles.find(device);
  if (found == s.handles.end()) return "cuBLAS, which computes what our kernel does not: " + s.reason;
  const Handle handle = found->second;
  // Row-major [rows, columns] is column-major [columns, rows]: y^T [N, M] = weight [N, K] . x^T [K, M], where the
  // memory of weight reads as [K, N] and that of x as [K, M], K apart.
  const float one = 1.0f, zero = 0.0f;
  const cudaDataType type = data_type(p.dtype);
  Status status = s.functions.set_stream(handle, stream);
  if (status == 0) status = s.functions.set_workspace(handle, workspace, workspace_bytes);  // a new stream drops it
  if (status == 0) {
    status =
        s.functions.gemm(handle, kTransposed, kNotTransposed, p.outer, p.num_rows, p.inner, &one, p.weight, type,
                         p.inner, p.x, type, p.inner, &zero, p.y, type, p.outer, kComputeFloat32, kChoosesAlgorithm);
  }
  return status == 0 ? "" : "cuBLAS failed with status " + std::to_string(status);
}

}  // namespace trt_eagle3
