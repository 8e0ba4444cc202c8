/* Made by `python -m trt_eagle3.engine.capi.header` from the descriptions in
 * trt_eagle3/graph/ops and engine/capi/kernels.py: change those. Include trt_eagle3.h. */

#ifndef TRT_EAGLE3_KERNELS_H
#define TRT_EAGLE3_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TE3_ABI_VERSION 10
#define TE3_MAX_RANK 4

/* Return value of a call.
 *
 * INVALID_ARGUMENT: an invalid shape, dtype or alignment, or a null pointer. NOT_SUPPORTED:
 * valid, but no kernel computes it on this device. WRONG_DEVICE: no CUDA device, or memory of
 * another device than the current one. CUDA_ERROR: the launch failed. */
typedef enum te3_status {
  TE3_OK = 0,
  TE3_INVALID_ARGUMENT = 1,
  TE3_NOT_SUPPORTED = 2,
  TE3_WRONG_DEVICE = 3,
  TE3_CUDA_ERROR = 4
} te3_status;

/* Element types of tensors, by torch's names. */
typedef enum te3_dtype {
  TE3_FLOAT32 = 0,
  TE3_FLOAT16 = 1,
  TE3_BFLOAT16 = 2,
  TE3_INT32 = 3,
  TE3_BOOL = 4,
  TE3_FLOAT8_E4M3FN = 5,
  TE3_UINT8 = 6,
  TE3_INT8 = 7
} te3_dtype;

/* Mask of the tail: an explicit mask, or token i attends to slots up to its own. */
typedef enum te3_mask {
  TE3_MASK_TREE = 0,
  TE3_MASK_CAUSAL = 1
} te3_mask;

/* Implementation of attention. Values other than AUTO are for tests and measurements.
 *
 * PROMPT is only for ``TreeAttention``: the kernel for many new tokens, on Hopper. */
typedef enum te3_path {
  TE3_PATH_AUTO = 0,
  TE3_PATH_SIMPLE = 1,
  TE3_PATH_MMA = 2,
  TE3_PATH_WGMMA = 3,
  TE3_PATH_PROMPT = 4
} te3_path;

typedef struct te3_tensor {
  void* data;
  int32_t dtype; /* te3_dtype */
  int32_t rank;
  int64_t shape[TE3_MAX_RANK];
} te3_tensor;

/* sum = x + residual; y = RMSNorm(sum) * weight. Without a residual (null data), y = RMSNorm(x)
 * * weight, and there is no sum. The residual stream may be float32 if T is not: residual and
 * sum, with x of either type; without a residual, x. */
typedef struct te3_add_rms_norm_args {
  te3_tensor x;        /* T or float32 [n, H] */
  te3_tensor residual; /* T or float32 [n, H], or null data with sum's */
  te3_tensor weight;   /* T [H]; the factor is weight + weight_offset */
  te3_tensor y;        /* T [n, H] */
  te3_tensor sum;      /* [n, H], of residual's type */
  float epsilon;
  float weight_offset;
} te3_add_rms_norm_args;

te3_status te3_add_rms_norm(const te3_add_rms_norm_args* args, void* stream);

/* Splits qkv, normalises each head of q and k (with q_norm and k_norm), rotates pair i (channels
 * i, i + P) by position_ids[pair_axis[i]] * inv_freq[i]. Channels from 2 P on are unchanged. */
typedef struct te3_qk_norm_mrope_args {
  te3_tensor qkv;          /* T [N, (Hq + 2 Hkv) * D] */
  te3_tensor position_ids; /* int32 [3, B, S] */
  te3_tensor inv_freq;     /* float32 [P], P at most D / 2 */
  te3_tensor pair_axis;    /* int32 [P], each 0, 1 or 2 */
  te3_tensor q_norm;       /* T [D], or null data with k_norm's */
  te3_tensor k_norm;       /* T [D] */
  te3_tensor q;            /* T [N, Hq * D] */
  te3_tensor k;            /* T [N, Hkv * D] */
  te3_tensor v;            /* T [N, Hkv * D] */
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  float epsilon;
  float weight_offset;     /* added to q_norm and k_norm */
  int32_t prefetch_safe;   /* as linear's, of position_ids, inv_freq, pair_axis and the norms */
} te3_qk_norm_mrope_args;

te3_status te3_qk_norm_mrope(const te3_qk_norm_mrope_args* args, void* stream);

/* Writes new token i of row b to its slot past + (M - S) + i, then attends over [0, past) and
 * the tail slots in tree_mask. Tokens i >= query_lengths[b] are padding: they write no cache, no
 * token attends to them, their output is 0. With TE3_MASK_CAUSAL token i attends to every slot
 * up to its own; tree_mask.data may be null, its shape is still read. From S = 256 on, rows of
 * the batch may share pages: each attends to what the others write. With kv_scales the caches
 * hold e4m3 numbers. Times their head's scale they are keys and values. New ones times the
 * inverse scale, in float32, are rounded to nearest even and clipped to 448. */
typedef struct te3_tree_attention_args {
  te3_tensor q;             /* T [N, Hq * D] */
  te3_tensor k;             /* T [N, Hkv * D] */
  te3_tensor v;             /* T [N, Hkv * D] */
  te3_tensor k_cache;       /* T or uint8 (e4m3) [slots, Hkv, D], updated in place */
  te3_tensor v_cache;       /* T or uint8 (e4m3) [slots, Hkv, D], updated in place */
  te3_tensor past_lengths;  /* int32 [B] */
  te3_tensor query_lengths; /* int32 [B] */
  te3_tensor page_table;    /* int32 [B, P] */
  te3_tensor tree_mask;     /* bool [B, S, M] */
  te3_tensor kv_scales;     /* float32 [2, Hkv] of keys and values: FP8 caches; or null data */
  te3_tensor out;           /* T [N, Hq * D] */
  int32_t page_size;
  float scale;
  int32_t mask;             /* te3_mask */
  int32_t path;             /* te3_path; only for tests and measurements, as num_splits */
  int32_t num_splits;       /* 0: chosen from the shapes */
  int32_t prefetch_safe;    /* 1: caches, page_table, lengths are prefetch-safe (te3_linear_args) */
  int32_t window;           /* hides slots that are this far from a token's own, or farther; 0: none */
  int32_t anchor_window;    /* hides slots below past - anchor_window; 0: none */
  int32_t write_only;       /* 1: only writes the new tokens; nothing is written to out */
} te3_tree_attention_args;

/* Bytes of device memory, aligned to 16, that te3_tree_attention needs besides its tensors;
 * often 0. It depends on shapes and the device, not on lengths. Its contents are not kept
 * between launches. */
te3_status te3_tree_attention_workspace(const te3_tree_attention_args* args, size_t* bytes);
te3_status te3_tree_attention(
    const te3_tree_attention_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* out = silu(gate) * up. */
typedef struct te3_silu_mul_args {
  te3_tensor gate_up; /* T [n, 2 * width], gate first */
  te3_tensor out;     /* T [n, width] */
} te3_silu_mul_args;

te3_status te3_silu_mul(const te3_silu_mul_args* args, void* stream);

/* Rotates pair i (channels i and i + D/2) of every head of q and k by
 * rope_positions[pair_axis[i]] * inv_freq[i], then attends from each patch over the patches of
 * its own frame. Frame f has patches frame_starts[f] to frame_starts[f + 1] - 1, or none.
 * float32, and head_dims other than 64, 72, 80 and 128, are computed without tensor cores. */
typedef struct te3_vision_attention_args {
  te3_tensor qkv;            /* T [n, 3 * H * D]: q, k and v of all heads */
  te3_tensor rope_positions; /* int32 [2, n] */
  te3_tensor inv_freq;       /* float32 [D / 2] */
  te3_tensor pair_axis;      /* int32 [D / 2], each 0 or 1 */
  te3_tensor frame_starts;   /* int32 [F + 1], ascending from 0 to n */
  te3_tensor out;            /* T [n, H * D] */
  int32_t num_heads;
  float scale;
  int32_t path;              /* te3_path; only for tests and measurements */
} te3_vision_attention_args;

/* Bytes of device memory, aligned to 16, that te3_vision_attention needs besides its tensors. It
 * depends only on the shapes. Its contents are not kept between launches. */
te3_status te3_vision_attention_workspace(const te3_vision_attention_args* args, size_t* bytes);
te3_status te3_vision_attention(
    const te3_vision_attention_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* A causal convolution over the path of each row and silu, q and k normalised to length one, the
 * gated delta rule along the path, and RMSNorm by heads times silu(z). Reads the states at
 * state_reads[b]. Writes those after the first certain[b] rows at state_writes[b], which differs
 * from every entry that is read. Also outputs the first 64 rows, which advance states later
 * (te3_commit_delta, te3_commit_window). Rows attend as in tree_mask; more than 64 rows must be
 * a chain, and the mask is not read. In 16 bits, more than 16 rows use tensor cores, whose
 * operands are rounded to T. TE3_NOT_SUPPORTED for heads wider than 128 or not a multiple of 4,
 * for more than 8 taps, and before Hopper for trees that do not fit into shared memory. */
typedef struct te3_gated_delta_args {
  te3_tensor qkvz;         /* T [B * S, C + Hv * Dv], C = 2 * Hk * Dk + Hv * Dv */
  te3_tensor ba;           /* T [B * S, 2 * Hv] */
  te3_tensor conv_weight;  /* T [C, 1, W], the last tap is the row's own */
  te3_tensor a_log;        /* float32 [Hv] */
  te3_tensor dt_bias;      /* float32 [Hv] */
  te3_tensor norm;         /* T [Dv] */
  te3_tensor conv_state;   /* T [E, W - 1, C], updated in place */
  te3_tensor delta_state;  /* float32 [E, Hv, Dk, Dv], updated in place */
  te3_tensor state_reads;  /* int32 [B] */
  te3_tensor state_writes; /* int32 [B] */
  te3_tensor certain;      /* int32 [B], 0 to S */
  te3_tensor tree_mask;    /* bool [B, S, M]: the new rows are the last S columns */
  te3_tensor out;          /* T [B * S, Hv * Dv] */
  te3_tensor conv_rows;    /* T [B, min(S, 64), C] */
  te3_tensor delta_rows;   /* float32 [B, min(S, 64), Hk * Dk + Hv * Dv + 2 * Hv]: k, v, g, beta */
  int32_t num_k_heads;     /* Hk */
  int32_t num_v_heads;     /* Hv, a multiple of Hk */
  float epsilon;
  int32_t blocks_per_head; /* only for tests and measurements, as chunk_rows; without tensor cores; 0: chosen */
  int32_t chunk_rows;      /* rows of a chain, solved as one system */
  int32_t prefetch_safe;   /* 1: states, entries, certain, tree_mask, conv_weight are (te3_linear_args) */
} te3_gated_delta_args;

/* Bytes of device memory, aligned to 16, that te3_gated_delta needs besides its tensors, for
 * more than 16 rows of 16 bits. Smaller shapes need no more. The size is the same on every
 * device. Its contents are not kept between launches. */
te3_status te3_gated_delta_workspace(const te3_gated_delta_args* args, size_t* bytes);
te3_status te3_gated_delta(
    const te3_gated_delta_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* y = x . weight^T, for few rows of x, as in decoding. TE3_NOT_SUPPORTED for float32, for K that
 * is not a multiple of 32, and for more than 64 rows. On Hopper, 9 to 16 rows whose x does not
 * fit into shared memory are computed only if K is a multiple of 128. More than 16 rows also
 * need a weight of 64 MiB or more. Before Hopper x must fit.
 *
 * prefetch_safe = 1 promises that no launch that may still be running writes the weight, so that
 * it is read while the launch before this one drains. Launches of this library start before the
 * one before them has ended. Any other launch, copy or CUDA graph waits for all earlier ones,
 * and memory written before it is prefetch-safe. */
typedef struct te3_linear_args {
  te3_tensor x;          /* T [M, K] */
  te3_tensor weight;     /* T [N, K] */
  te3_tensor y;          /* T [M, N] */
  int32_t prefetch_safe;
} te3_linear_args;

te3_status te3_linear(const te3_linear_args* args, void* stream);

/* sum = x + residual; y = LayerNorm(sum) * weight + bias. Without a residual (null data) y is
 * LayerNorm(x) * weight + bias, and there is no sum. */
typedef struct te3_add_layer_norm_args {
  te3_tensor x;        /* T [n, H] */
  te3_tensor residual; /* T [n, H], or null data with sum's */
  te3_tensor weight;   /* T [H] */
  te3_tensor bias;     /* T [H] */
  te3_tensor y;        /* T [n, H] */
  te3_tensor sum;      /* T [n, H] */
  float epsilon;
} te3_add_layer_norm_args;

te3_status te3_add_layer_norm(const te3_add_layer_norm_args* args, void* stream);

/* Copies row source[b, i] of sequence b to row destination[b, i], in every plane. All rows are
 * read before any is written. A negative source or destination moves nothing. Without a
 * page_table (null data) rows are slots. */
typedef struct te3_kv_move_args {
  te3_tensor cache;       /* T, uint8 or int32 [planes, slots, Hkv, D] */
  te3_tensor source;      /* int32 [B, K] */
  te3_tensor destination; /* int32 [B, K] */
  te3_tensor page_table;  /* int32 [B, P], or null data */
  int32_t page_size;
} te3_kv_move_args;

te3_status te3_kv_move(const te3_kv_move_args* args, void* stream);

/* y = x . (weight * scale)^T for a few rows of x; a scale covers one row, 128 rows or all, and
 * 128 columns or all. TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper
 * also for more than 16 rows, or if x does not fit into shared memory. K must be a multiple of
 * 128, N of 16. The weight is exact in T, sums and scales are float32. prefetch_safe: as
 * linear's, for weight and scales. */
typedef struct te3_linear_fp8_args {
  te3_tensor x;          /* T [M, K] */
  te3_tensor weight;     /* float8_e4m3fn [N, K], packed */
  te3_tensor scale;      /* float32 [N or ceil(N / 128) or 1, 1 or K / 128] */
  te3_tensor y;          /* T [M, N] */
  int32_t prefetch_safe;
} te3_linear_fp8_args;

te3_status te3_linear_fp8(const te3_linear_fp8_args* args, void* stream);

/* y = x . ((weight - 128) * scale)^T for a few rows of x; scales and limits as linear_fp8's. */
typedef struct te3_linear_int8_args {
  te3_tensor x;          /* T [M, K] */
  te3_tensor weight;     /* uint8 [N, K], packed codes */
  te3_tensor scale;      /* float32 [N or ceil(N / 128) or 1, 1 or K / 128] */
  te3_tensor y;          /* T [M, N] */
  int32_t prefetch_safe;
} te3_linear_int8_args;

te3_status te3_linear_int8(const te3_linear_int8_args* args, void* stream);

/* y = x . ((weight - zero_point) * scale)^T for a few rows of x; groups of 32, 64 or 128
 * columns. TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper also for more
 * than 16 rows, or if x does not fit into shared memory. K must be a multiple of 128, N of 16.
 * The weight is exact in T, sums and scales are float32. prefetch_safe: as linear's, for weight
 * and scales. */
typedef struct te3_linear_int4_args {
  te3_tensor x;          /* T [M, K] */
  te3_tensor weight;     /* int32 [N, K / 8], packed codes 0 to 15 */
  te3_tensor scale;      /* float16 or bfloat16 [N, K / group] */
  te3_tensor zero_point; /* uint8 [N, K / group], 0 to 15; null data: 8 */
  te3_tensor y;          /* T [M, N] */
  int32_t prefetch_safe;
} te3_linear_int4_args;

te3_status te3_linear_int4(const te3_linear_int4_args* args, void* stream);

/* y = x . (weight * scale * row_scale)^T for a few rows of x; a scale covers 16 columns.
 * TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper also for more than 16
 * rows, or if x does not fit into shared memory. K must be a multiple of 128, N of 16. The
 * weight is exact in T, sums and scales are float32. prefetch_safe: as linear's, for weight and
 * scales. */
typedef struct te3_linear_nvfp4_args {
  te3_tensor x;          /* T [M, K] */
  te3_tensor weight;     /* int32 [N, K / 8], packed e2m1 */
  te3_tensor scale;      /* float8_e4m3fn [N, K / 16] */
  te3_tensor row_scale;  /* float32 [N, 1] */
  te3_tensor y;          /* T [M, N] */
  int32_t prefetch_safe;
} te3_linear_nvfp4_args;

te3_status te3_linear_nvfp4(const te3_linear_nvfp4_args* args, void* stream);

/* y = (x * x_scale) . (weight * scale)^T, products of bytes: float8_e4m3fn by float8_e4m3fn,
 * summed by the chip in about 14 bits, or int8 by (codes - 128), summed exactly. Only for int8,
 * x_scale has a second row: the sums of the rows of x. TE3_NOT_SUPPORTED for float32, and on
 * chips other than Hopper. K must be a multiple of 128, N of 16. prefetch_safe: as linear's, for
 * weight and scale. */
typedef struct te3_linear_w8a8_args {
  te3_tensor x;          /* float8_e4m3fn or int8 [M, K], packed */
  te3_tensor x_scale;    /* float32 [1, M]; for int8 [2, M] */
  te3_tensor weight;     /* float8_e4m3fn or uint8 [N, K], packed */
  te3_tensor scale;      /* float32 [N or 1, 1] */
  te3_tensor y;          /* T [M, N] */
  int32_t prefetch_safe;
} te3_linear_w8a8_args;

te3_status te3_linear_w8a8(const te3_linear_w8a8_args* args, void* stream);

/* out = weight * scale, rounded once, columns in their own order: for stock products. */
typedef struct te3_unpack_fp8_args {
  te3_tensor weight; /* float8_e4m3fn [N, K], packed */
  te3_tensor scale;  /* float32 [N or ceil(N / 128) or 1, 1 or K / 128] */
  te3_tensor out;    /* T [N, K] */
} te3_unpack_fp8_args;

te3_status te3_unpack_fp8(const te3_unpack_fp8_args* args, void* stream);

/* out = (weight - 128) * scale, rounded once, columns in their own order: for stock products. */
typedef struct te3_unpack_int8_args {
  te3_tensor weight; /* uint8 [N, K], packed codes */
  te3_tensor scale;  /* float32 [N or ceil(N / 128) or 1, 1 or K / 128] */
  te3_tensor out;    /* T [N, K] */
} te3_unpack_int8_args;

te3_status te3_unpack_int8(const te3_unpack_int8_args* args, void* stream);

/* out = (weight - zero_point) * scale, rounded once, columns in their own order: for stock
 * products. */
typedef struct te3_unpack_int4_args {
  te3_tensor weight;     /* int32 [N, K / 8], packed codes 0 to 15 */
  te3_tensor scale;      /* float16 or bfloat16 [N, K / group] */
  te3_tensor zero_point; /* uint8 [N, K / group], 0 to 15; null data: 8 */
  te3_tensor out;        /* T [N, K] */
} te3_unpack_int4_args;

te3_status te3_unpack_int4(const te3_unpack_int4_args* args, void* stream);

/* out = weight * scale * row_scale, rounded once, columns in their own order: for stock
 * products. */
typedef struct te3_unpack_nvfp4_args {
  te3_tensor weight;    /* int32 [N, K / 8], packed e2m1 */
  te3_tensor scale;     /* float8_e4m3fn [N, K / 16] */
  te3_tensor row_scale; /* float32 [N, 1] */
  te3_tensor out;       /* T [N, K] */
} te3_unpack_nvfp4_args;

te3_status te3_unpack_nvfp4(const te3_unpack_nvfp4_args* args, void* stream);

/* y = sum over a row's top_k experts e of w[e] * down[e] . (silu(gate[e] . x) * (up[e] . x)); w
 * is the softmax of the row's logits in float32, over all experts, or over its own top_k with
 * renormalise. Of equal logits the first is chosen. Inner values are rounded to T, sums are
 * float32, y is rounded once. For more than 64 rows, or 1024 / k, each expert's part is rounded
 * to T before it is weighted. So many rows need Hopper, and H and I that are multiples of 128.
 * TE3_NOT_SUPPORTED otherwise, for float32, and if shared memory does not hold a row's spans. At
 * most 512 experts, 16 of a row. H must be a multiple of 16, I of 8. */
typedef struct te3_fused_moe_args {
  te3_tensor x;             /* T [n, H] */
  te3_tensor router_logits; /* T [n, E] */
  te3_tensor gate_up;       /* T [E, 2 * I, H], gate first */
  te3_tensor down;          /* T [E, H, I] */
  te3_tensor y;             /* T [n, H] */
  int32_t top_k;
  int32_t renormalise;      /* 0 or 1 */
} te3_fused_moe_args;

/* Bytes of device memory, aligned to 16, that the kernel needs besides its tensors: the inner
 * values, T [n * k, I]; for more than 64 rows also each row once for each of its experts, T [n *
 * k, H], and their positions. Its content is not used after the launch. */
te3_status te3_fused_moe_workspace(const te3_fused_moe_args* args, size_t* bytes);
te3_status te3_fused_moe(
    const te3_fused_moe_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* fused_moe with FP8 experts. H and I must be multiples of 128; weights, scales and zero points
 * as linear_fp8's. */
typedef struct te3_fused_moe_fp8_args {
  te3_tensor x;             /* T [n, H] */
  te3_tensor router_logits; /* T [n, E] */
  te3_tensor gate_up;       /* float8_e4m3fn [E, 2 * I, H], packed */
  te3_tensor gate_up_scale; /* float32 [E, 2 * I or ceil(2 * I / 128) or 1, 1 or H / 128] */
  te3_tensor down;          /* float8_e4m3fn [E, H, I], packed */
  te3_tensor down_scale;    /* float32 [E, H or ceil(H / 128) or 1, 1 or I / 128] */
  te3_tensor y;             /* T [n, H] */
  int32_t top_k;
  int32_t renormalise;      /* 0 or 1 */
} te3_fused_moe_fp8_args;

/* Bytes of device memory, aligned to 16, that the kernel needs besides its tensors: the inner
 * values, T [n * k, I]; for more than 64 rows also each row once for each of its experts, T [n *
 * k, H], and their positions. Its content is not used after the launch. */
te3_status te3_fused_moe_fp8_workspace(const te3_fused_moe_fp8_args* args, size_t* bytes);
te3_status te3_fused_moe_fp8(
    const te3_fused_moe_fp8_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* fused_moe with INT4 experts. H and I must be multiples of 128; weights, scales and zero points
 * as linear_int4's; both with equal groups and types. */
typedef struct te3_fused_moe_int4_args {
  te3_tensor x;                  /* T [n, H] */
  te3_tensor router_logits;      /* T [n, E] */
  te3_tensor gate_up;            /* int32 [E, 2 * I, H / 8], packed codes 0 to 15 */
  te3_tensor gate_up_scale;      /* float16 or bfloat16 [E, 2 * I, H / group] */
  te3_tensor gate_up_zero_point; /* uint8 [E, 2 * I, H / group], or null data with down's: 8 */
  te3_tensor down;               /* int32 [E, H, I / 8], packed codes 0 to 15 */
  te3_tensor down_scale;         /* float16 or bfloat16 [E, H, I / group] */
  te3_tensor down_zero_point;    /* uint8 [E, H, I / group] */
  te3_tensor y;                  /* T [n, H] */
  int32_t top_k;
  int32_t renormalise;           /* 0 or 1 */
} te3_fused_moe_int4_args;

/* Bytes of device memory, aligned to 16, that the kernel needs besides its tensors: the inner
 * values, T [n * k, I]; for more than 64 rows also each row once for each of its experts, T [n *
 * k, H], and their positions. Its content is not used after the launch. */
te3_status te3_fused_moe_int4_workspace(const te3_fused_moe_int4_args* args, size_t* bytes);
te3_status te3_fused_moe_int4(
    const te3_fused_moe_int4_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* The experts of each row of router_logits, the most probable first, with their shares, as
 * fused_moe chooses them; the number of rows of each 64 that go through each expert, and each
 * row's index among those. At most 512 experts, 16 of a row. */
typedef struct te3_route_rows_args {
  te3_tensor router_logits; /* T [n, E] */
  te3_tensor experts;       /* int32 [n, k] */
  te3_tensor shares;        /* float32 [n, k] */
  te3_tensor places;        /* int32 [n, k], index among the expert's rows of its 64 */
  te3_tensor counts;        /* int32 [ceil(n / 64), E] */
  int32_t renormalise;      /* 0 or 1 */
} te3_route_rows_args;

te3_status te3_route_rows(const te3_route_rows_args* args, void* stream);

/* Copies each row of x once for each of its experts, sorted by expert, from the outputs of
 * route_rows. Row positions[i, r] of gathered is row i of x, for its expert experts[i, r]; the
 * rows of expert e end at ends[e]. H must be a multiple of 8. */
typedef struct te3_gather_rows_args {
  te3_tensor x;         /* T [n, H] */
  te3_tensor experts;   /* int32 [n, k] */
  te3_tensor places;    /* int32 [n, k] */
  te3_tensor counts;    /* int32 [ceil(n / 64), E] */
  te3_tensor gathered;  /* T [n * k, H] */
  te3_tensor positions; /* int32 [n, k] */
  te3_tensor ends;      /* int32 [E] */
} te3_gather_rows_args;

te3_status te3_gather_rows(const te3_gather_rows_args* args, void* stream);

/* y[i] = sum over r of shares[i, r] * parts[positions[i, r]], in float32 and in the order of r,
 * rounded once. H must be a multiple of 8. */
typedef struct te3_combine_rows_args {
  te3_tensor parts;     /* T [n * k, H] */
  te3_tensor positions; /* int32 [n, k] */
  te3_tensor shares;    /* float32 [n, k] */
  te3_tensor y;         /* T [n, H] */
} te3_combine_rows_args;

te3_status te3_combine_rows(const te3_combine_rows_args* args, void* stream);

/* scale = largest |x| / 448 of a row, or of each 128 columns of it (1 if that is below 1e-30).
 * For FP8 products with a weight, q = x * (448 / largest), rounded to the nearest, packed as a
 * weight. For products with few rows, q = those numbers times scale, in T and in their own
 * order. For int8 the largest number is 127 instead of 448, scales are by row only, and scale's
 * second row is the sum of q. K must be a multiple of 128. */
typedef struct te3_quantise_rows_args {
  te3_tensor x;     /* T [M, K] */
  te3_tensor q;     /* float8_e4m3fn or int8 [M, K], packed; or T [M, K] */
  te3_tensor scale; /* float32 [1 or K / 128, M]; for int8 [2, M] */
} te3_quantise_rows_args;

te3_status te3_quantise_rows(const te3_quantise_rows_args* args, void* stream);

/* quantise_rows of the output of silu_mul, rounded to T. */
typedef struct te3_quantise_silu_mul_args {
  te3_tensor gate_up; /* T [M, 2 * K] */
  te3_tensor q;       /* float8_e4m3fn or int8 [M, K], packed; or T [M, K] */
  te3_tensor scale;   /* float32 [1 or K / 128, M]; for int8 [2, M] */
} te3_quantise_silu_mul_args;

te3_status te3_quantise_silu_mul(const te3_quantise_silu_mul_args* args, void* stream);

/* quantise_rows of the y of add_rms_norm, rounded to T; TE3_NOT_SUPPORTED for more than 8192
 * columns. */
typedef struct te3_quantise_add_rms_norm_args {
  te3_tensor x;        /* T [M, K] */
  te3_tensor residual; /* T [M, K], or null data with sum's */
  te3_tensor weight;   /* T [K] */
  te3_tensor q;        /* float8_e4m3fn or int8 [M, K], packed; or T [M, K] */
  te3_tensor scale;    /* float32 [1 or K / 128, M]; for int8 [2, M] */
  te3_tensor sum;      /* T [M, K] */
  float epsilon;
} te3_quantise_add_rms_norm_args;

te3_status te3_quantise_add_rms_norm(const te3_quantise_add_rms_norm_args* args, void* stream);

/* Advances entry entries[b] of every layer by rows path[b] of te3_gated_delta's delta_rows, one
 * after the other. */
typedef struct te3_commit_delta_args {
  te3_tensor state;   /* float32 [L * E, Hv, Dk, Dv], updated in place */
  te3_tensor rows;    /* float32 [L, B, T, Hk * Dk + Hv * Dv + 2 * Hv] */
  te3_tensor entries; /* int32 [B], all different for rows with path[b, 0] >= 0 */
  te3_tensor path;    /* int32 [B, K], rows of the T, ascending; negative after the last */
} te3_commit_delta_args;

te3_status te3_commit_delta(const te3_commit_delta_args* args, void* stream);

/* Advances the window at entry entries[b] of every layer by rows path[b] of te3_gated_delta's
 * conv_rows. */
typedef struct te3_commit_window_args {
  te3_tensor state;   /* T [L, E, W - 1, C], updated in place */
  te3_tensor rows;    /* T [L, B, T, C] */
  te3_tensor entries; /* int32 [B], all different for rows with path[b, 0] >= 0 */
  te3_tensor path;    /* int32 [B, K], rows of the T, ascending; negative after the last */
} te3_commit_window_args;

te3_status te3_commit_window(const te3_commit_window_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* TRT_EAGLE3_KERNELS_H */
