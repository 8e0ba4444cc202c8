/* The kernels as a C library. Every argument is checked on the host before anything is launched: shape, dtype,
 * alignment, and that the memory is on the current device. A failed call launches nothing and te3_last_error() says
 * why.
 *
 * Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D head_dim, H
 * hidden. Tensors are contiguous, row-major. T is one of float32, float16, bfloat16, the same for all tensors of a
 * call. `stream` is a cudaStream_t. Nothing is allocated, nothing waits: calls may be captured in a CUDA graph. */
#ifndef TRT_EAGLE3_H
#define TRT_EAGLE3_H

#include "trt_eagle3_kernels.h" /* the kernels, their arguments and the numbers in them */

#ifdef __cplusplus
extern "C" {
#endif

int32_t te3_abi_version(void);

/* What the last failed call of this thread found; empty before any. */
const char* te3_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* TRT_EAGLE3_H */
