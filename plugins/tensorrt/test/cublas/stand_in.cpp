// Stands in for libcublas on the host: float32 products on host memory, and a count of what is asked of it. It fails
// where cuBLAS would, or would compute something else than Linear wants.
#include <cuda_runtime_api.h>
#include <library_types.h>

#define STAND_IN extern "C" __attribute__((visibility("default")))

struct cublasContext {
  bool sums_in_compute_type = false;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;
};

namespace {
int handles = 0, products = 0;
constexpr int kOk = 0, kNotInitialized = 1, kInvalidValue = 7;
}  // namespace

STAND_IN int cublas_stand_in_handles() { return handles; }
STAND_IN int cublas_stand_in_products() { return products; }

STAND_IN int cublasCreate_v2(cublasContext** handle) {
  ++handles;
  *handle = new cublasContext;
  return kOk;
}
STAND_IN int cublasDestroy_v2(cublasContext* handle) {
  --handles;
  delete handle;
  return kOk;
}
STAND_IN int cublasSetMathMode(cublasContext* handle, int mode) {
  handle->sums_in_compute_type = mode == 16;
  return kOk;
}
STAND_IN int cublasSetStream_v2(cublasContext* handle, cudaStream_t stream) {
  handle->stream = stream;
  handle->workspace = nullptr;
  return kOk;
}
STAND_IN int cublasSetWorkspace_v2(cublasContext* handle, void* workspace, size_t) {
  handle->workspace = workspace;
  return kOk;
}
// Column-major c [m, n] = op(a) [m, k] . op(b) [k, n], as BLAS defines it.
STAND_IN int cublasGemmEx(cublasContext* handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha,
                          const void* a, cudaDataType a_type, int lda, const void* b, cudaDataType b_type, int ldb,
                          const void* beta, void* c, cudaDataType c_type, int ldc, int compute_type, int algorithm) {
  if (handle == nullptr || handle->workspace == nullptr || !handle->sums_in_compute_type) return kNotInitialized;
  const bool sound = compute_type == 68 && algorithm == -1 && a_type == CUDA_R_32F && b_type == CUDA_R_32F &&
                     c_type == CUDA_R_32F && lda >= (trans_a != 0 ? k : m) && ldb >= (trans_b != 0 ? n : k) && ldc >= m;
  if (!sound) return kInvalidValue;
  ++products;
  const auto *x = static_cast<const float*>(a), *y = static_cast<const float*>(b);
  auto* z = static_cast<float*>(c);
  for (int column = 0; column < n; ++column) {
    for (int row = 0; row < m; ++row) {
      double sum = 0.0;
      for (int i = 0; i < k; ++i) {
        sum += static_cast<double>(trans_a != 0 ? x[row * lda + i] : x[i * lda + row]) *
               (trans_b != 0 ? y[i * ldb + column] : y[column * ldb + i]);
      }
      const float old = *static_cast<const float*>(beta) == 0.0f ? 0.0f : z[column * ldc + row];
      z[column * ldc + row] =
          *static_cast<const float*>(alpha) * static_cast<float>(sum) + *static_cast<const float*>(beta) * old;
    }
  }
  return kOk;
}
