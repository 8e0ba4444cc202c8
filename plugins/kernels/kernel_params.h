// Made by `python -m trt_eagle3.engine.capi.header` from the descriptions in
// trt_eagle3/graph/ops and engine/capi/kernels.py: change those. Include params.h.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace trt_eagle3 {

// sum = x + residual; y = RMSNorm(sum) * weight. Without a residual (null data), y = RMSNorm(x) *
// weight, and there is no sum. The residual stream may be float32 if T is not: residual and sum,
// with x of either type; without a residual, x.
struct AddRmsNormParams {
  const void* x;         // T or float32 [n, H]
  const void* residual;  // T or float32 [n, H], or null data with sum's
  const void* weight;    // T [H]; the factor is weight + weight_offset
  void* y;               // T [n, H]
  void* sum;             // [n, H], of residual's type
  int32_t num_rows;
  int32_t hidden;
  DType dtype;           // T
  DType x_dtype;         // X: T or float32; T if there is a 16-bit residual
  DType residual_dtype;  // R: T or float32; not read without a residual
  float epsilon;
  float weight_offset;
};

cudaError_t add_rms_norm(const AddRmsNormParams& params, cudaStream_t stream);

// Splits qkv, normalises each head of q and k (with q_norm and k_norm), rotates pair i (channels i,
// i + P) by position_ids[pair_axis[i]] * inv_freq[i]. Channels from 2 P on are unchanged.
struct QKNormMRopeParams {
  const void* qkv;              // T [N, (Hq + 2 Hkv) * D]
  const int32_t* position_ids;  // int32 [3, B, S]
  const float* inv_freq;        // float32 [P], P at most D / 2
  const int32_t* pair_axis;     // int32 [P], each 0, 1 or 2
  const void* q_norm;           // T [D], or null data with k_norm's
  const void* k_norm;           // T [D]
  void* q;                      // T [N, Hq * D]
  void* k;                      // T [N, Hkv * D]
  void* v;                      // T [N, Hkv * D]
  int32_t num_tokens;           // N
  int32_t num_pairs;            // P
  DType dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  float epsilon;
  float weight_offset;          // added to q_norm and k_norm
  int32_t prefetch_safe;        // as linear's, of position_ids, inv_freq, pair_axis and the norms
};

cudaError_t qk_norm_mrope(const QKNormMRopeParams& params, cudaStream_t stream);

// Writes new token i of row b to its slot past + (M - S) + i, then attends over [0, past) and the
// tail slots in tree_mask. Tokens i >= query_lengths[b] are padding: they write no cache, no token
// attends to them, their output is 0. With TE3_MASK_CAUSAL token i attends to every slot up to its
// own; tree_mask.data may be null, its shape is still read. From S = 256 on, rows of the batch may
// share pages: each attends to what the others write. With kv_scales the caches hold e4m3 numbers.
// Times their head's scale they are keys and values. New ones times the inverse scale, in float32,
// are rounded to nearest even and clipped to 448.
struct TreeAttentionParams {
  const void* q;                 // T [N, Hq * D]
  const void* k;                 // T [N, Hkv * D]
  const void* v;                 // T [N, Hkv * D]
  void* k_cache;                 // T or uint8 (e4m3) [slots, Hkv, D], updated in place
  void* v_cache;                 // T or uint8 (e4m3) [slots, Hkv, D], updated in place
  const int32_t* past_lengths;   // int32 [B]
  const int32_t* query_lengths;  // int32 [B]
  const int32_t* page_table;     // int32 [B, P]
  const uint8_t* tree_mask;      // bool [B, S, M]
  const float* kv_scales;        // float32 [2, Hkv] of keys and values: FP8 caches; or null data
  void* out;                     // T [N, Hq * D]
  int32_t batch;
  int32_t num_new;               // S
  int32_t tail;                  // M
  int32_t pages_per_row;         // P
  int32_t page_shift;            // log2 of page_size, or -1 when it is no power of two
  int32_t num_heads;
  int32_t num_kv_heads;
  uint32_t group_inverse;        // row / (Hq / Hkv) as a product: ceil(2^32 / ratio), 0 where it is 1
  int32_t head_dim;
  DType dtype;
  int32_t written;               // set by the launcher: the cache already has the new tokens
  int32_t page_size;
  float scale;
  MaskKind mask;
  AttentionPath path;            // only for tests and measurements, as num_splits
  int32_t num_splits;            // 0: chosen from the shapes
  int32_t prefetch_safe;         // 1: caches, page_table, lengths are prefetch-safe (te3_linear_args)
  int32_t window;                // hides slots that are this far from a token's own, or farther; 0: none
  int32_t anchor_window;         // hides slots below past - anchor_window; 0: none
  int32_t write_only;            // 1: only writes the new tokens; nothing is written to out
};

// Bytes of device memory, aligned to 16, that te3_tree_attention needs besides its tensors; often
// 0. It depends on shapes and the device, not on lengths. Its contents are not kept between
// launches.
cudaError_t tree_attention_workspace(const TreeAttentionParams& params, size_t* bytes);
cudaError_t tree_attention(
    const TreeAttentionParams& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// out = silu(gate) * up.
struct SiluMulParams {
  const void* gate_up;  // T [n, 2 * width], gate first
  void* out;            // T [n, width]
  int32_t num_rows;
  int32_t width;
  DType dtype;
};

cudaError_t silu_mul(const SiluMulParams& params, cudaStream_t stream);

// Rotates pair i (channels i and i + D/2) of every head of q and k by rope_positions[pair_axis[i]]
// * inv_freq[i], then attends from each patch over the patches of its own frame. Frame f has
// patches frame_starts[f] to frame_starts[f + 1] - 1, or none. float32, and head_dims other than
// 64, 72, 80 and 128, are computed without tensor cores.
struct VisionAttentionParams {
  const void* qkv;                // T [n, 3 * H * D]: q, k and v of all heads
  const int32_t* rope_positions;  // int32 [2, n]
  const float* inv_freq;          // float32 [D / 2]
  const int32_t* pair_axis;       // int32 [D / 2], each 0 or 1
  const int32_t* frame_starts;    // int32 [F + 1], ascending from 0 to n
  void* out;                      // T [n, H * D]
  int32_t num_patches;            // n
  int32_t num_frames;             // F
  int32_t head_dim;
  DType dtype;
  int32_t num_heads;
  float scale;
  AttentionPath path;             // only for tests and measurements
};

// Bytes of device memory, aligned to 16, that te3_vision_attention needs besides its tensors. It
// depends only on the shapes. Its contents are not kept between launches.
cudaError_t vision_attention_workspace(const VisionAttentionParams& params, size_t* bytes);
cudaError_t vision_attention(
    const VisionAttentionParams& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// A causal convolution over the path of each row and silu, q and k normalised to length one, the
// gated delta rule along the path, and RMSNorm by heads times silu(z). Reads the states at
// state_reads[b]. Writes those after the first certain[b] rows at state_writes[b], which differs
// from every entry that is read. Also outputs the first 64 rows, which advance states later
// (te3_commit_delta, te3_commit_window). Rows attend as in tree_mask; more than 64 rows must be a
// chain, and the mask is not read. In 16 bits, more than 16 rows use tensor cores, whose operands
// are rounded to T. TE3_NOT_SUPPORTED for heads wider than 128 or not a multiple of 4, for more
// than 8 taps, and before Hopper for trees that do not fit into shared memory.
struct GatedDeltaParams {
  const void* qkvz;             // T [B * S, C + Hv * Dv], C = 2 * Hk * Dk + Hv * Dv
  const void* ba;               // T [B * S, 2 * Hv]
  const void* conv_weight;      // T [C, 1, W], the last tap is the row's own
  const float* a_log;           // float32 [Hv]
  const float* dt_bias;         // float32 [Hv]
  const void* norm;             // T [Dv]
  void* conv_state;             // T [E, W - 1, C], updated in place
  float* delta_state;           // float32 [E, Hv, Dk, Dv], updated in place
  const int32_t* state_reads;   // int32 [B]
  const int32_t* state_writes;  // int32 [B]
  const int32_t* certain;       // int32 [B], 0 to S
  const uint8_t* tree_mask;     // bool [B, S, M]: the new rows are the last S columns
  void* out;                    // T [B * S, Hv * Dv]
  void* conv_rows;              // T [B, min(S, 64), C]
  float* delta_rows;            // float32 [B, min(S, 64), Hk * Dk + Hv * Dv + 2 * Hv]: k, v, g, beta
  int32_t batch;
  int32_t num_new;              // S
  int32_t tail;                 // M
  int32_t kept;                 // rows of conv_rows and delta_rows
  int32_t channels;             // C
  int32_t key_dim;
  int32_t value_dim;
  int32_t taps;                 // W
  int32_t rows_at_once;         // set by the launcher
  DType dtype;
  int32_t num_k_heads;          // Hk
  int32_t num_v_heads;          // Hv, a multiple of Hk
  float epsilon;
  int32_t blocks_per_head;      // only for tests and measurements, as chunk_rows; without tensor cores; 0: chosen
  int32_t chunk_rows;           // rows of a chain, solved as one system
  int32_t prefetch_safe;        // 1: states, entries, certain, tree_mask, conv_weight are (te3_linear_args)
};

// Bytes of device memory, aligned to 16, that te3_gated_delta needs besides its tensors, for more
// than 16 rows of 16 bits. Smaller shapes need no more. The size is the same on every device. Its
// contents are not kept between launches.
cudaError_t gated_delta_workspace(const GatedDeltaParams& params, size_t* bytes);
cudaError_t gated_delta(
    const GatedDeltaParams& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// y = x . weight^T, for few rows of x, as in decoding. TE3_NOT_SUPPORTED for float32, for K that is
// not a multiple of 32, and for more than 64 rows. On Hopper, 9 to 16 rows whose x does not fit
// into shared memory are computed only if K is a multiple of 128. More than 16 rows also need a
// weight of 64 MiB or more. Before Hopper x must fit.
struct LinearParams {
  const void* x;          // T [M, K]
  const void* weight;     // T [N, K]
  void* y;                // T [M, N]
  int32_t num_rows;       // M
  int32_t inner;          // K
  int32_t outer;          // N
  DType dtype;
  int32_t prefetch_safe;
};

cudaError_t linear(const LinearParams& params, cudaStream_t stream);

// sum = x + residual; y = LayerNorm(sum) * weight + bias. Without a residual (null data) y is
// LayerNorm(x) * weight + bias, and there is no sum.
struct AddLayerNormParams {
  const void* x;         // T [n, H]
  const void* residual;  // T [n, H], or null data with sum's
  const void* weight;    // T [H]
  const void* bias;      // T [H]
  void* y;               // T [n, H]
  void* sum;             // T [n, H]
  int32_t num_rows;
  int32_t hidden;
  DType dtype;
  float epsilon;
};

cudaError_t add_layer_norm(const AddLayerNormParams& params, cudaStream_t stream);

// Copies row source[b, i] of sequence b to row destination[b, i], in every plane. All rows are read
// before any is written. A negative source or destination moves nothing. Without a page_table (null
// data) rows are slots.
struct KVMoveParams {
  void* cache;                 // T, uint8 or int32 [planes, slots, Hkv, D]
  const int32_t* source;       // int32 [B, K]
  const int32_t* destination;  // int32 [B, K]
  const int32_t* page_table;   // int32 [B, P], or null data
  int64_t slots;
  int32_t planes;
  int32_t row_bytes;           // a multiple of 16
  int32_t batch;
  int32_t num_moves;           // K
  int32_t pages_per_row;
  int32_t page_size;
};

cudaError_t kv_move(const KVMoveParams& params, cudaStream_t stream);

// y = x . (weight * scale)^T for a few rows of x; a scale covers one row, 128 rows or all, and 128
// columns or all. TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper also for
// more than 16 rows, or if x does not fit into shared memory. K must be a multiple of 128, N of 16.
// The weight is exact in T, sums and scales are float32. prefetch_safe: as linear's, for weight and
// scales.
struct LinearFp8Params {
  const void* x;          // T [M, K]
  const void* weight;     // float8_e4m3fn [N, K], packed
  const float* scale;     // float32 [N or ceil(N / 128) or 1, 1 or K / 128]
  void* y;                // T [M, N]
  int32_t num_rows;       // M
  int32_t inner;          // K
  int32_t outer;          // N
  int32_t scale_rows;
  int32_t scale_columns;
  DType dtype;
  int32_t prefetch_safe;
};

cudaError_t linear_fp8(const LinearFp8Params& params, cudaStream_t stream);

// y = x . ((weight - 128) * scale)^T for a few rows of x; scales and limits as linear_fp8's.
struct LinearInt8Params {
  const void* x;          // T [M, K]
  const void* weight;     // uint8 [N, K], packed codes
  const float* scale;     // float32 [N or ceil(N / 128) or 1, 1 or K / 128]
  void* y;                // T [M, N]
  int32_t num_rows;       // M
  int32_t inner;          // K
  int32_t outer;          // N
  int32_t scale_rows;
  int32_t scale_columns;
  DType dtype;
  int32_t prefetch_safe;
};

cudaError_t linear_int8(const LinearInt8Params& params, cudaStream_t stream);

// y = x . ((weight - zero_point) * scale)^T for a few rows of x; groups of 32, 64 or 128 columns.
// TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper also for more than 16
// rows, or if x does not fit into shared memory. K must be a multiple of 128, N of 16. The weight
// is exact in T, sums and scales are float32. prefetch_safe: as linear's, for weight and scales.
struct LinearInt4Params {
  const void* x;           // T [M, K]
  const int32_t* weight;   // int32 [N, K / 8], packed codes 0 to 15
  const void* scale;       // float16 or bfloat16 [N, K / group]
  const void* zero_point;  // uint8 [N, K / group], 0 to 15; null data: 8
  void* y;                 // T [M, N]
  int32_t num_rows;        // M
  int32_t inner;           // K
  int32_t outer;           // N
  int32_t group;           // columns of a scale
  DType scale_dtype;
  DType dtype;
  int32_t prefetch_safe;
};

cudaError_t linear_int4(const LinearInt4Params& params, cudaStream_t stream);

// y = x . (weight * scale * row_scale)^T for a few rows of x; a scale covers 16 columns.
// TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper also for more than 16
// rows, or if x does not fit into shared memory. K must be a multiple of 128, N of 16. The weight
// is exact in T, sums and scales are float32. prefetch_safe: as linear's, for weight and scales.
struct LinearNvfp4Params {
  const void* x;           // T [M, K]
  const int32_t* weight;   // int32 [N, K / 8], packed e2m1
  const void* scale;       // float8_e4m3fn [N, K / 16]
  const float* row_scale;  // float32 [N, 1]
  void* y;                 // T [M, N]
  int32_t num_rows;        // M
  int32_t inner;           // K
  int32_t outer;           // N
  DType dtype;
  int32_t prefetch_safe;
};

cudaError_t linear_nvfp4(const LinearNvfp4Params& params, cudaStream_t stream);

// y = (x * x_scale) . (weight * scale)^T, products of bytes: float8_e4m3fn by float8_e4m3fn, summed
// by the chip in about 14 bits, or int8 by (codes - 128), summed exactly. Only for int8, x_scale
// has a second row: the sums of the rows of x. TE3_NOT_SUPPORTED for float32, and on chips other
// than Hopper. K must be a multiple of 128, N of 16. prefetch_safe: as linear's, for weight and
// scale.
struct LinearW8A8Params {
  const void* x;          // float8_e4m3fn or int8 [M, K], packed
  const float* x_scale;   // float32 [1, M]; for int8 [2, M]
  const void* weight;     // float8_e4m3fn or uint8 [N, K], packed
  const float* scale;     // float32 [N or 1, 1]
  void* y;                // T [M, N]
  int32_t num_rows;       // M
  int32_t inner;          // K
  int32_t outer;          // N
  int32_t scale_rows;
  int32_t integers;       // whether x is int8
  DType dtype;
  int32_t prefetch_safe;
};

cudaError_t linear_w8a8(const LinearW8A8Params& params, cudaStream_t stream);

// out = weight * scale, rounded once, columns in their own order: for stock products.
struct UnpackFp8Params {
  const void* weight;     // float8_e4m3fn [N, K], packed
  const float* scale;     // float32 [N or ceil(N / 128) or 1, 1 or K / 128]
  void* out;              // T [N, K]
  int32_t inner;          // K
  int32_t outer;          // N
  int32_t scale_rows;
  int32_t scale_columns;
  DType dtype;
};

cudaError_t unpack_fp8(const UnpackFp8Params& params, cudaStream_t stream);

// out = (weight - 128) * scale, rounded once, columns in their own order: for stock products.
struct UnpackInt8Params {
  const void* weight;     // uint8 [N, K], packed codes
  const float* scale;     // float32 [N or ceil(N / 128) or 1, 1 or K / 128]
  void* out;              // T [N, K]
  int32_t inner;          // K
  int32_t outer;          // N
  int32_t scale_rows;
  int32_t scale_columns;
  DType dtype;
};

cudaError_t unpack_int8(const UnpackInt8Params& params, cudaStream_t stream);

// out = (weight - zero_point) * scale, rounded once, columns in their own order: for stock
// products.
struct UnpackInt4Params {
  const int32_t* weight;   // int32 [N, K / 8], packed codes 0 to 15
  const void* scale;       // float16 or bfloat16 [N, K / group]
  const void* zero_point;  // uint8 [N, K / group], 0 to 15; null data: 8
  void* out;               // T [N, K]
  int32_t inner;           // K
  int32_t outer;           // N
  int32_t group;           // columns of a scale
  DType scale_dtype;
  DType dtype;
};

cudaError_t unpack_int4(const UnpackInt4Params& params, cudaStream_t stream);

// out = weight * scale * row_scale, rounded once, columns in their own order: for stock products.
struct UnpackNvfp4Params {
  const int32_t* weight;   // int32 [N, K / 8], packed e2m1
  const void* scale;       // float8_e4m3fn [N, K / 16]
  const float* row_scale;  // float32 [N, 1]
  void* out;               // T [N, K]
  int32_t inner;           // K
  int32_t outer;           // N
  DType dtype;
};

cudaError_t unpack_nvfp4(const UnpackNvfp4Params& params, cudaStream_t stream);

// y = sum over a row's top_k experts e of w[e] * down[e] . (silu(gate[e] . x) * (up[e] . x)); w is
// the softmax of the row's logits in float32, over all experts, or over its own top_k with
// renormalise. Of equal logits the first is chosen. Inner values are rounded to T, sums are
// float32, y is rounded once. For more than 64 rows, or 1024 / k, each expert's part is rounded to
// T before it is weighted. So many rows need Hopper, and H and I that are multiples of 128.
// TE3_NOT_SUPPORTED otherwise, for float32, and if shared memory does not hold a row's spans. At
// most 512 experts, 16 of a row. H must be a multiple of 16, I of 8.
struct FusedMoeParams {
  const void* x;              // T [n, H]
  const void* router_logits;  // T [n, E]
  const void* gate_up;        // T [E, 2 * I, H], gate first
  const void* down;           // T [E, H, I]
  void* y;                    // T [n, H]
  int32_t num_rows;           // n
  int32_t num_experts;        // E
  int32_t hidden;             // H
  int32_t width;              // I
  DType dtype;
  int32_t top_k;
  int32_t renormalise;        // 0 or 1
};

// Bytes of device memory, aligned to 16, that the kernel needs besides its tensors: the inner
// values, T [n * k, I]; for more than 64 rows also each row once for each of its experts, T [n * k,
// H], and their positions. Its content is not used after the launch.
cudaError_t fused_moe_workspace(const FusedMoeParams& params, size_t* bytes);
cudaError_t fused_moe(
    const FusedMoeParams& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// fused_moe with FP8 experts. H and I must be multiples of 128; weights, scales and zero points as
// linear_fp8's.
struct FusedMoeFp8Params {
  const void* x;                  // T [n, H]
  const void* router_logits;      // T [n, E]
  const void* gate_up;            // float8_e4m3fn [E, 2 * I, H], packed
  const float* gate_up_scale;     // float32 [E, 2 * I or ceil(2 * I / 128) or 1, 1 or H / 128]
  const void* down;               // float8_e4m3fn [E, H, I], packed
  const float* down_scale;        // float32 [E, H or ceil(H / 128) or 1, 1 or I / 128]
  void* y;                        // T [n, H]
  int32_t num_rows;               // n
  int32_t num_experts;            // E
  int32_t hidden;                 // H
  int32_t width;                  // I
  DType dtype;
  int32_t gate_up_scale_rows;
  int32_t gate_up_scale_columns;
  int32_t down_scale_rows;
  int32_t down_scale_columns;
  int32_t top_k;
  int32_t renormalise;            // 0 or 1
};

// Bytes of device memory, aligned to 16, that the kernel needs besides its tensors: the inner
// values, T [n * k, I]; for more than 64 rows also each row once for each of its experts, T [n * k,
// H], and their positions. Its content is not used after the launch.
cudaError_t fused_moe_fp8_workspace(const FusedMoeFp8Params& params, size_t* bytes);
cudaError_t fused_moe_fp8(
    const FusedMoeFp8Params& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// fused_moe with INT4 experts. H and I must be multiples of 128; weights, scales and zero points as
// linear_int4's; both with equal groups and types.
struct FusedMoeInt4Params {
  const void* x;                   // T [n, H]
  const void* router_logits;       // T [n, E]
  const int32_t* gate_up;          // int32 [E, 2 * I, H / 8], packed codes 0 to 15
  const void* gate_up_scale;       // float16 or bfloat16 [E, 2 * I, H / group]
  const void* gate_up_zero_point;  // uint8 [E, 2 * I, H / group], or null data with down's: 8
  const int32_t* down;             // int32 [E, H, I / 8], packed codes 0 to 15
  const void* down_scale;          // float16 or bfloat16 [E, H, I / group]
  const void* down_zero_point;     // uint8 [E, H, I / group]
  void* y;                         // T [n, H]
  int32_t num_rows;                // n
  int32_t num_experts;             // E
  int32_t hidden;                  // H
  int32_t width;                   // I
  DType dtype;
  int32_t group;                   // columns of a scale
  DType scale_dtype;
  int32_t top_k;
  int32_t renormalise;             // 0 or 1
};

// Bytes of device memory, aligned to 16, that the kernel needs besides its tensors: the inner
// values, T [n * k, I]; for more than 64 rows also each row once for each of its experts, T [n * k,
// H], and their positions. Its content is not used after the launch.
cudaError_t fused_moe_int4_workspace(const FusedMoeInt4Params& params, size_t* bytes);
cudaError_t fused_moe_int4(
    const FusedMoeInt4Params& params, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// The experts of each row of router_logits, the most probable first, with their shares, as
// fused_moe chooses them; the number of rows of each 64 that go through each expert, and each row's
// index among those. At most 512 experts, 16 of a row.
struct RouteRowsParams {
  const void* router_logits;  // T [n, E]
  int32_t* experts;           // int32 [n, k]
  float* shares;              // float32 [n, k]
  int32_t* places;            // int32 [n, k], index among the expert's rows of its 64
  int32_t* counts;            // int32 [ceil(n / 64), E]
  int32_t num_rows;           // n
  int32_t num_experts;        // E
  int32_t top_k;              // k
  DType dtype;
  int32_t renormalise;        // 0 or 1
};

cudaError_t route_rows(const RouteRowsParams& params, cudaStream_t stream);

// Copies each row of x once for each of its experts, sorted by expert, from the outputs of
// route_rows. Row positions[i, r] of gathered is row i of x, for its expert experts[i, r]; the rows
// of expert e end at ends[e]. H must be a multiple of 8.
struct GatherRowsParams {
  const void* x;           // T [n, H]
  const int32_t* experts;  // int32 [n, k]
  const int32_t* places;   // int32 [n, k]
  const int32_t* counts;   // int32 [ceil(n / 64), E]
  void* gathered;          // T [n * k, H]
  int32_t* positions;      // int32 [n, k]
  int32_t* ends;           // int32 [E]
  int32_t num_rows;        // n
  int32_t num_experts;     // E
  int32_t hidden;          // H
  int32_t top_k;           // k
  DType dtype;
};

cudaError_t gather_rows(const GatherRowsParams& params, cudaStream_t stream);

// y[i] = sum over r of shares[i, r] * parts[positions[i, r]], in float32 and in the order of r,
// rounded once. H must be a multiple of 8.
struct CombineRowsParams {
  const void* parts;         // T [n * k, H]
  const int32_t* positions;  // int32 [n, k]
  const float* shares;       // float32 [n, k]
  void* y;                   // T [n, H]
  int32_t num_rows;          // n
  int32_t hidden;            // H
  int32_t top_k;             // k
  DType dtype;
};

cudaError_t combine_rows(const CombineRowsParams& params, cudaStream_t stream);

// scale = largest |x| / 448 of a row, or of each 128 columns of it (1 if that is below 1e-30). For
// FP8 products with a weight, q = x * (448 / largest), rounded to the nearest, packed as a weight.
// For products with few rows, q = those numbers times scale, in T and in their own order. For int8
// the largest number is 127 instead of 448, scales are by row only, and scale's second row is the
// sum of q. K must be a multiple of 128.
struct QuantiseRowsParams {
  const void* x;     // T [M, K]
  void* q;           // float8_e4m3fn or int8 [M, K], packed; or T [M, K]
  float* scale;      // float32 [1 or K / 128, M]; for int8 [2, M]
  int32_t num_rows;  // M
  int32_t inner;     // K
  int32_t groups;    // scales of a row
  int32_t rounds;    // whether q is T
  int32_t integers;  // whether q is int8
  DType dtype;
};

cudaError_t quantise_rows(const QuantiseRowsParams& params, cudaStream_t stream);

// quantise_rows of the output of silu_mul, rounded to T.
struct QuantiseSiluMulParams {
  const void* gate_up;  // T [M, 2 * K]
  void* q;              // float8_e4m3fn or int8 [M, K], packed; or T [M, K]
  float* scale;         // float32 [1 or K / 128, M]; for int8 [2, M]
  int32_t num_rows;     // M
  int32_t inner;        // K
  int32_t groups;       // scales of a row
  int32_t rounds;       // whether q is T
  int32_t integers;     // whether q is int8
  DType dtype;
};

cudaError_t quantise_silu_mul(const QuantiseSiluMulParams& params, cudaStream_t stream);

// quantise_rows of the y of add_rms_norm, rounded to T; TE3_NOT_SUPPORTED for more than 8192
// columns.
struct QuantiseAddRmsNormParams {
  const void* x;         // T [M, K]
  const void* residual;  // T [M, K], or null data with sum's
  const void* weight;    // T [K]
  void* q;               // float8_e4m3fn or int8 [M, K], packed; or T [M, K]
  float* scale;          // float32 [1 or K / 128, M]; for int8 [2, M]
  void* sum;             // T [M, K]
  int32_t num_rows;      // M
  int32_t inner;         // K
  int32_t groups;        // scales of a row
  int32_t rounds;        // whether q is T
  int32_t integers;      // whether q is int8
  DType dtype;
  float epsilon;
};

cudaError_t quantise_add_rms_norm(const QuantiseAddRmsNormParams& params, cudaStream_t stream);

// Advances entry entries[b] of every layer by rows path[b] of te3_gated_delta's delta_rows, one
// after the other.
struct CommitDeltaParams {
  float* state;            // float32 [L * E, Hv, Dk, Dv], updated in place
  const float* rows;       // float32 [L, B, T, Hk * Dk + Hv * Dv + 2 * Hv]
  const int32_t* entries;  // int32 [B], all different for rows with path[b, 0] >= 0
  const int32_t* path;     // int32 [B, K], rows of the T, ascending; negative after the last
  int32_t num_layers;      // L
  int32_t num_entries;     // E
  int32_t batch;
  int32_t num_rows;        // T
  int32_t num_moves;       // K
  int32_t num_k_heads;
  int32_t num_v_heads;
  int32_t key_dim;
  int32_t value_dim;
};

cudaError_t commit_delta(const CommitDeltaParams& params, cudaStream_t stream);

// Advances the window at entry entries[b] of every layer by rows path[b] of te3_gated_delta's
// conv_rows.
struct CommitWindowParams {
  void* state;             // T [L, E, W - 1, C], updated in place
  const void* rows;        // T [L, B, T, C]
  const int32_t* entries;  // int32 [B], all different for rows with path[b, 0] >= 0
  const int32_t* path;     // int32 [B, K], rows of the T, ascending; negative after the last
  int32_t num_layers;      // L
  int32_t num_entries;     // E
  int32_t batch;
  int32_t num_rows;        // T
  int32_t num_moves;       // K
  int32_t width;           // W - 1
  int32_t channels;
  DType dtype;
};

cudaError_t commit_window(const CommitWindowParams& params, cudaStream_t stream);

}  // namespace trt_eagle3
