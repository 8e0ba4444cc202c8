// What the kernels share: conversions, 16-byte moves, asynchronous copies, warp products, and reductions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "params.h"

namespace trt_eagle3 {

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else
    return x;
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// Two floats as a register of two 16-bit values, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// kCount values that move as one access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory; writes zeros instead where `bytes` is 0.
__device__ __forceinline__ void copy_async16(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Begins to bring the line of a pointer to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* pointer) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(pointer)); }

__device__ __forceinline__ void load_matrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d += a . b, 16 x 8 x 16.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, "
        "%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x to two units in the last place; 0 for -inf and for results that would be denormal.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / (1 + e^-x); where T has 16 bits far nearer than it rounds, in a third of the instructions.
template <typename T>
__device__ __forceinline__ float silu(float x) {
  if constexpr (std::is_same_v<T, float>) return x / (1.0f + expf(-x));
  return __fdividef(x, 1.0f + __expf(-x));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Over the four lanes that hold one row of a 16 x 8 tile.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Every kernel begins with this: it may have been launched before the kernel that it depends on had finished (see
// launch()). No read before it but of what its caller calls prefetch_safe, and none of anything else through the
// read-only cache after it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();  // now the next one may come up, and wait in turn
#endif
}

// For short launches: the next one may come up while this one still waits, and fetch what is older than both.
__device__ __forceinline__ void wait_for_previous_beside_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// The first half of that: for what a kernel does before it waits.
__device__ __forceinline__ void let_next_come_up() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Whether the current device is a Hopper or later: its kernels may come up while the one before them drains.
inline bool is_hopper_or_later() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

enum class Overlap { kNo, kYes };

// How much of a Hopper multiprocessor's memory every kernel asks to have as shared memory, in percent of the most: 132
// of 228 KiB. The rest is the L1 cache, through which Linear's loads come. Without it a launch finds what the one
// before it left: after attention with blocks of 200 KiB a decode step was a third slower. Measured:
// docs/measurements.md, "Big pairs on one H200".
constexpr int kSharedCarveout = 58;

// Launches a kernel that begins with wait_for_previous(), with kYes while the one before drains; `cluster` blocks along
// x form a cluster; `carveout` as kSharedCarveout.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_with_carveout(int carveout, Overlap overlap, void (*kernel)(Parameters...), dim3 grid, int threads,
                                 int shared_bytes, int cluster, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  const bool hopper = is_hopper_or_later();
  if (hopper) {
    const auto preferred = cudaFuncAttributePreferredSharedMemoryCarveout;
    const cudaError_t error = cudaFuncSetAttribute(kernel, preferred, carveout);
    if (error != cudaSuccess) return error;
  }
  if (overlap == Overlap::kYes && hopper) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// With the carveout of all kernels.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(Overlap overlap, void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                   int cluster, cudaStream_t stream, Arguments&&... arguments) {
  return launch_with_carveout(kSharedCarveout, overlap, kernel, grid, threads, shared_bytes, cluster, stream,
                              arguments...);
}

// Calls `f` with a value of the element type.
template <typename F>
cudaError_t with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat16:
      return f(__half{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

// Passes by the L1 cache: for weights, of which nothing is read twice, and which nobody writes while a launch lasts.
__device__ __forceinline__ uint4 load_once(const void* source) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source));
  return value;
}

}  // namespace trt_eagle3
