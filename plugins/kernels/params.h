// Parameters and launchers of every kernel: plain pointers and sizes, no framework types.
//
// Shapes: B rows, S new tokens per row, N = B * S, M masked tail (M >= S), P pages per row, Hq / Hkv heads, D head_dim,
// H hidden. All tensors are contiguous and on the current device. A launcher allocates nothing and never synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace trt_eagle3 {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Who sees whom in the tail: an explicit mask, or token i sees tail slots up to its own.
enum class MaskKind : int32_t { kTree = 0, kCausal = 1 };

// How products are computed. kAuto picks; the rest are for tests and measurements.
enum class AttentionPath : int32_t { kAuto = 0, kSimple = 1, kMma = 2, kWgmma = 3 };

struct TreeAttentionParams {
  const void* q;                 // T [N, Hq * D]
  const void* k;                 // T [N, Hkv * D]
  const void* v;                 // T [N, Hkv * D]
  void* k_cache;                 // T [slots, Hkv, D], updated in place
  void* v_cache;                 // T [slots, Hkv, D], updated in place
  const int32_t* past_lengths;   // [B]
  const int32_t* query_lengths;  // [B]
  const int32_t* page_table;     // [B, P]
  const uint8_t* tree_mask;      // bool [B, S, M]; not read when mask is kCausal
  void* out;                     // T [N, Hq * D]
  int32_t batch;
  int32_t num_new;        // S
  int32_t tail;           // M
  int32_t pages_per_row;  // P
  int32_t page_size;
  int32_t page_shift;  // log2 of page_size, or -1 when it is no power of two
  int32_t num_heads;
  int32_t num_kv_heads;
  uint32_t group_inverse;  // ceil(2^32 / (Hq / Hkv)), 0 when the ratio is 1: row / ratio as a product
  int32_t head_dim;
  float scale;
  DType dtype;
  MaskKind mask;
  AttentionPath path;
  int32_t num_splits;  // 0: chosen from the shapes
  int32_t written;     // set by the launcher: the new tokens are in the cache already
  // Caches, page table and lengths are older than any launch that may still be running: they are read early.
  int32_t prefetch_safe;
};

struct QKNormMRopeParams {
  const void* qkv;              // T [N, (Hq + 2 Hkv) * D]
  const int32_t* position_ids;  // [3, N]
  const float* inv_freq;        // [D / 2]
  const int32_t* pair_axis;     // [D / 2], values 0..2
  const void* q_norm;           // T [D], or null: no norm
  const void* k_norm;           // T [D], or null: no norm
  void* q;                      // T [N, Hq * D]
  void* k;                      // T [N, Hkv * D]
  void* v;                      // T [N, Hkv * D]
  int32_t num_tokens;           // N
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  float epsilon;
  DType dtype;
};

struct AddRmsNormParams {
  const void* x;         // X [n, H]
  const void* residual;  // S [n, H], or null
  const void* weight;    // T [H]
  void* y;               // T [n, H]
  void* sum;             // S [n, H]; null exactly when residual is
  int32_t num_rows;
  int32_t hidden;
  float epsilon;
  DType dtype;           // T
  DType x_dtype;         // X: T or float32; T where there is a 16-bit residual
  DType residual_dtype;  // S: T or float32; not read without a residual
};

struct AddLayerNormParams {
  const void* x;         // T [n, H]
  const void* residual;  // T [n, H], or null
  const void* weight;    // T [H]
  const void* bias;      // T [H]
  void* y;               // T [n, H]
  void* sum;             // T [n, H]; null exactly when residual is
  int32_t num_rows;
  int32_t hidden;
  float epsilon;
  DType dtype;
};

struct SiluMulParams {
  const void* gate_up;  // T [n, 2 * width], gate first
  void* out;            // T [n, width]
  int32_t num_rows;
  int32_t width;
  DType dtype;
};

// Attention of each patch over the patches of its own frame, q and k rotated by their rows and columns.
struct VisionAttentionParams {
  const void* qkv;                // T [n, 3 * H * D]
  const int32_t* rope_positions;  // [2, n]: row and column of each patch
  const float* inv_freq;          // [D / 2]
  const int32_t* pair_axis;       // [D / 2], values 0 and 1
  const int32_t* frame_starts;    // [F + 1], ascending from 0 to n; frames may be empty
  void* out;                      // T [n, H * D]
  int32_t num_patches;            // n
  int32_t num_frames;             // F
  int32_t num_heads;
  int32_t head_dim;
  float scale;
  DType dtype;
  AttentionPath path;
};

// y = x . weight^T.
struct LinearParams {
  const void* x;          // T [M, K]
  const void* weight;     // T [N, K]
  void* y;                // T [M, N]
  int32_t num_rows;       // M
  int32_t inner;          // K
  int32_t outer;          // N
  int32_t prefetch_safe;  // the weight is older than any launch that may still be running: it is read early
  DType dtype;
};

// Moves row `source` of each sequence to row `destination` in every plane (layer, key or value) as if at once.
struct KVMoveParams {
  void* cache;                 // [planes, slots, row_bytes]
  const int32_t* source;       // [B, K] rows of the sequence; negative: no move
  const int32_t* destination;  // [B, K]; negative: no move
  const int32_t* page_table;   // [B, P], or null: source and destination are slots
  int64_t slots;
  int32_t planes;
  int32_t row_bytes;  // a multiple of 16
  int32_t batch;
  int32_t num_moves;  // K
  int32_t pages_per_row;
  int32_t page_size;
};

// Bytes of workspace that tree_attention wants. Nothing in it outlives a launch.
cudaError_t tree_attention_workspace(const TreeAttentionParams& params, size_t* bytes);
cudaError_t tree_attention(const TreeAttentionParams& params, void* workspace, size_t workspace_bytes,
                           cudaStream_t stream);
cudaError_t qk_norm_mrope(const QKNormMRopeParams& params, cudaStream_t stream);
cudaError_t add_rms_norm(const AddRmsNormParams& params, cudaStream_t stream);
cudaError_t add_layer_norm(const AddLayerNormParams& params, cudaStream_t stream);
cudaError_t silu_mul(const SiluMulParams& params, cudaStream_t stream);
cudaError_t linear(const LinearParams& params, cudaStream_t stream);
// Bytes of workspace that vision_attention wants: packed q, k and v. Nothing in it outlives a launch.
cudaError_t vision_attention_workspace(const VisionAttentionParams& params, size_t* bytes);
cudaError_t vision_attention(const VisionAttentionParams& params, void* workspace, size_t workspace_bytes,
                             cudaStream_t stream);
cudaError_t kv_move(const KVMoveParams& params, cudaStream_t stream);

// Most rows of x that linear() takes; cudaErrorNotSupported for what cuBLAS computes as fast.
constexpr int32_t kMaxLinearRows = 64;

// Most moves of one launch (all rows of the batch together): a column of all of them is held in shared memory.
constexpr int32_t kMaxKVMoves = 2048;

}  // namespace trt_eagle3
