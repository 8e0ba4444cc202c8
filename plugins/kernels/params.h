// Parameters and launchers of every kernel: plain pointers and sizes, no framework types.
//
// Shapes: B rows, S new tokens per row, N = B * S, M masked tail (M >= S), P pages per row, Hq / Hkv heads, D head_dim,
// H hidden. All tensors are contiguous and on the current device. A launcher allocates nothing and never synchronises.
#pragma once

#include <cstdint>

namespace trt_eagle3 {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Who sees whom in the tail: an explicit mask, or token i sees tail slots up to its own.
enum class MaskKind : int32_t { kTree = 0, kCausal = 1 };

// How products are computed. kAuto picks; the rest are for tests and measurements. kPrompt is TreeAttention's alone.
enum class AttentionPath : int32_t { kAuto = 0, kSimple = 1, kMma = 2, kWgmma = 3, kPrompt = 4 };

// Most rows of x that linear() takes; cudaErrorNotSupported for what cuBLAS computes as fast.
constexpr int32_t kMaxLinearRows = 64;

// Most rows that the products with packed weights and 16-bit activations take.
constexpr int32_t kMaxPackedRows = 128;

// Most moves of one launch (all rows of the batch together): a column of all of them is held in shared memory.
constexpr int32_t kMaxKVMoves = 2048;

}  // namespace trt_eagle3

#include "kernel_params.h"  // what each kernel is launched with, of these types; and the launchers
