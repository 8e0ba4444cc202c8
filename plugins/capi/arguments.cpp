#include "arguments.h"

#include <climits>
#include <cmath>

namespace trt_eagle3 {
namespace {

// The numbers of the C interface are those of the kernels.
template <typename Kernels, typename Interface>
constexpr bool same(Kernels kernels, Interface interface) {
  return static_cast<int>(kernels) == static_cast<int>(interface);
}
static_assert(same(DType::kFloat32, TE3_FLOAT32) && same(DType::kFloat16, TE3_FLOAT16) &&
              same(DType::kBFloat16, TE3_BFLOAT16));
static_assert(same(MaskKind::kTree, TE3_MASK_TREE) && same(MaskKind::kCausal, TE3_MASK_CAUSAL));
static_assert(same(AttentionPath::kAuto, TE3_PATH_AUTO) && same(AttentionPath::kSimple, TE3_PATH_SIMPLE) &&
              same(AttentionPath::kMma, TE3_PATH_MMA) && same(AttentionPath::kWgmma, TE3_PATH_WGMMA) &&
              same(AttentionPath::kPrompt, TE3_PATH_PROMPT));

DType dtype_of(const te3_tensor& t) { return static_cast<DType>(t.dtype); }
const int32_t* ints(const te3_tensor& t) { return static_cast<const int32_t*>(t.data); }
bool fits_int(int64_t x) { return x >= 0 && x <= INT_MAX; }

}  // namespace

TreeAttentionParams tree_attention_params(const te3_tree_attention_args& a, Check* check) {
  TreeAttentionParams p = {};
  const int32_t t = a.q.dtype;
  const bool fp8 = a.kv_scales.data != nullptr;
  const int32_t cache = fp8 ? static_cast<int32_t>(TE3_UINT8) : t;
  check->floating("q", a.q);
  check->tensor("k_cache", a.k_cache, cache, {kAny, kAny, kAny}, "[slots, Hkv, D]");
  check->shape_of("tree_mask", a.tree_mask, TE3_BOOL, {kAny, kAny, kAny}, "[B, S, M]");
  if (!check->ok()) return p;
  const int64_t slots = a.k_cache.shape[0], heads_kv = a.k_cache.shape[1], dim = a.k_cache.shape[2];
  const int64_t batch = a.tree_mask.shape[0], tokens = a.tree_mask.shape[1], tail = a.tree_mask.shape[2];
  check->that(heads_kv > 0, [&] { return "k_cache: Hkv must be positive, got " + Check::text(a.k_cache); });
  check->that(dim > 0 && dim % 2 == 0 && dim <= 256,
              [&] { return "k_cache: head_dim must be even and at most 256, got " + std::to_string(dim); });
  check->that(tail >= tokens, [&] { return "tree_mask: M must be at least S, got " + Check::text(a.tree_mask); });
  if (!check->ok()) return p;
  check->tensor("q", a.q, t, {batch * tokens, kAny}, "[B * S, Hq * D]");
  check->that(a.q.shape[1] > 0 && a.q.shape[1] % (heads_kv * dim) == 0, [&] {
    return "q: Hq * D must be a multiple of Hkv * D = " + std::to_string(heads_kv * dim) + ", got " + Check::text(a.q);
  });
  check->tensor("k", a.k, t, {batch * tokens, heads_kv * dim}, "[B * S, Hkv * D]");
  check->tensor("v", a.v, t, {batch * tokens, heads_kv * dim}, "[B * S, Hkv * D]");
  check->tensor("v_cache", a.v_cache, cache, {slots, heads_kv, dim}, "[slots, Hkv, D]");
  if (fp8) check->tensor("kv_scales", a.kv_scales, TE3_FLOAT32, {2, heads_kv}, "[2, Hkv]");
  check->that(
      !fp8 || reinterpret_cast<uintptr_t>(a.k_cache.data) % 16 + reinterpret_cast<uintptr_t>(a.v_cache.data) % 16 == 0,
      "k_cache and v_cache: data must be aligned to 16 bytes");
  check->tensor("past_lengths", a.past_lengths, TE3_INT32, {batch}, "[B]");
  check->tensor("query_lengths", a.query_lengths, TE3_INT32, {batch}, "[B]");
  check->tensor("page_table", a.page_table, TE3_INT32, {batch, kAny}, "[B, P]");
  check->tensor("out", a.out, t, {batch * tokens, a.q.shape[1]}, "[B * S, Hq * D]");
  if (a.mask == TE3_MASK_TREE) check->data_of("tree_mask", a.tree_mask);
  check->that(a.page_size > 0 && slots % a.page_size == 0, [&] {
    return "page_size: must be positive and divide the cache's " + std::to_string(slots) + " slots, got " +
           std::to_string(a.page_size);
  });
  check->that(a.mask == TE3_MASK_TREE || a.mask == TE3_MASK_CAUSAL,
              [&] { return "mask: unknown kind " + std::to_string(a.mask); });
  check->that(a.path >= TE3_PATH_AUTO && a.path <= TE3_PATH_PROMPT,
              [&] { return "path: unknown " + std::to_string(a.path); });
  check->that(a.num_splits >= 0,
              [&] { return "num_splits: must not be negative, got " + std::to_string(a.num_splits); });
  check->that(a.window >= 0 && a.anchor_window >= 0 && (a.window == 0 || a.anchor_window == 0), [&] {
    return "window, anchor_window: expected one positive at most, got " + std::to_string(a.window) + " and " +
           std::to_string(a.anchor_window);
  });
  check->that(a.scale > 0.0f && std::isfinite(a.scale),  // what is hidden scores -inf before it is scaled
              [&] { return "scale: must be positive, got " + std::to_string(a.scale); });
  check->that(batch * heads_kv <= 65535,
              [&] { return "B * Hkv: at most 65535, got " + std::to_string(batch * heads_kv); });
  if (!check->ok()) return p;
  const int64_t pages = a.page_table.shape[1];
  check->that(
      fits_int(slots) && fits_int(pages * a.page_size + tail) && fits_int(batch * tokens * (a.q.shape[1] / dim)),
      "sizes: slots, P * page_size + M and N * Hq must fit 32 bits");
  check->that(a.q.data != a.out.data, "out: must not be q's memory");
  p.q = a.q.data;
  p.k = a.k.data;
  p.v = a.v.data;
  p.k_cache = a.k_cache.data;
  p.v_cache = a.v_cache.data;
  p.past_lengths = ints(a.past_lengths);
  p.query_lengths = ints(a.query_lengths);
  p.page_table = ints(a.page_table);
  p.tree_mask = static_cast<const uint8_t*>(a.tree_mask.data);
  p.kv_scales = static_cast<const float*>(a.kv_scales.data);
  p.out = a.out.data;
  p.batch = static_cast<int32_t>(batch);
  p.num_new = static_cast<int32_t>(tokens);
  p.tail = static_cast<int32_t>(tail);
  p.pages_per_row = static_cast<int32_t>(pages);
  p.page_size = a.page_size;
  p.page_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (1 << shift == a.page_size) p.page_shift = shift;
  }
  p.num_heads = static_cast<int32_t>(a.q.shape[1] / dim);
  p.num_kv_heads = static_cast<int32_t>(heads_kv);
  const int64_t group = p.num_heads / p.num_kv_heads;
  p.group_inverse = group > 1 ? static_cast<uint32_t>(((int64_t{1} << 32) + group - 1) / group) : 0;
  p.head_dim = static_cast<int32_t>(dim);
  p.scale = a.scale;
  p.dtype = dtype_of(a.q);
  p.mask = static_cast<MaskKind>(a.mask);
  p.path = static_cast<AttentionPath>(a.path);
  p.num_splits = a.num_splits;
  p.prefetch_safe = a.prefetch_safe;
  p.window = a.window;
  p.anchor_window = a.anchor_window;
  return p;
}

QKNormMRopeParams qk_norm_mrope_params(const te3_qk_norm_mrope_args& a, Check* check) {
  const int32_t t = a.qkv.dtype;
  const int64_t heads = a.num_heads, heads_kv = a.num_kv_heads, dim = a.head_dim;
  check->floating("qkv", a.qkv);
  check->that(heads > 0 && heads_kv > 0, "num_heads and num_kv_heads: must be positive");
  check->that(dim > 0 && dim % 4 == 0 && dim <= 256,
              [&] { return "head_dim: must be a multiple of 4, at most 256, got " + std::to_string(dim); });
  check->tensor("qkv", a.qkv, t, {kAny, (heads + 2 * heads_kv) * dim}, "[N, (Hq + 2 Hkv) * D]");
  check->tensor("position_ids", a.position_ids, TE3_INT32, {3, kAny, kAny}, "[3, B, S]");
  if (!check->ok()) return {};
  const int64_t tokens = a.qkv.shape[0];
  check->that(a.position_ids.shape[1] * a.position_ids.shape[2] == tokens, [&] {
    return "position_ids: expected [3, B, S] with B * S = " + std::to_string(tokens) + ", got " +
           Check::text(a.position_ids);
  });
  check->tensor("inv_freq", a.inv_freq, TE3_FLOAT32, {kAny}, "[P]");
  if (!check->ok()) return {};
  const int64_t pairs = a.inv_freq.shape[0];
  check->that(pairs > 0 && 2 * pairs <= dim,
              [&] { return "inv_freq: expected [P] with 2 P at most head_dim, got " + Check::text(a.inv_freq); });
  check->tensor("pair_axis", a.pair_axis, TE3_INT32, {pairs}, "[P]");
  check->that((a.q_norm.data == nullptr) == (a.k_norm.data == nullptr), "q_norm and k_norm: give both or neither");
  if (a.q_norm.data != nullptr) {
    check->tensor("q_norm", a.q_norm, t, {dim}, "[D]");
    check->tensor("k_norm", a.k_norm, t, {dim}, "[D]");
  }
  check->tensor("q", a.q, t, {tokens, heads * dim}, "[N, Hq * D]");
  check->tensor("k", a.k, t, {tokens, heads_kv * dim}, "[N, Hkv * D]");
  check->tensor("v", a.v, t, {tokens, heads_kv * dim}, "[N, Hkv * D]");
  check->that(fits_int(tokens), "qkv: too many rows");
  QKNormMRopeParams p = {};
  p.qkv = a.qkv.data;
  p.position_ids = ints(a.position_ids);
  p.inv_freq = static_cast<const float*>(a.inv_freq.data);
  p.pair_axis = ints(a.pair_axis);
  p.q_norm = a.q_norm.data;
  p.k_norm = a.k_norm.data;
  p.q = a.q.data;
  p.k = a.k.data;
  p.v = a.v.data;
  p.num_tokens = static_cast<int32_t>(tokens);
  p.num_heads = a.num_heads;
  p.num_kv_heads = a.num_kv_heads;
  p.head_dim = a.head_dim;
  p.num_pairs = static_cast<int32_t>(pairs);
  p.epsilon = a.epsilon;
  p.weight_offset = a.weight_offset;
  p.prefetch_safe = a.prefetch_safe;
  p.dtype = dtype_of(a.qkv);
  return p;
}

AddRmsNormParams add_rms_norm_params(const te3_add_rms_norm_args& a, Check* check) {
  const int32_t t = a.y.dtype;
  const bool adds = a.residual.data != nullptr;
  const int32_t stream = adds ? a.residual.dtype : a.x.dtype;
  check->floating("y", a.y);
  check->floating("x", a.x);
  check->tensor("x", a.x, a.x.dtype, {kAny, kAny}, "[n, H]");
  if (!check->ok()) return {};
  const int64_t rows = a.x.shape[0], hidden = a.x.shape[1];
  check->tensor("weight", a.weight, t, {hidden}, "[H]");
  check->tensor("y", a.y, t, {rows, hidden}, "[n, H]");
  check->that(adds == (a.sum.data != nullptr), "residual and sum: give both or neither");
  if (adds) {
    check->tensor("residual", a.residual, stream, {rows, hidden}, "[n, H]");
    check->tensor("sum", a.sum, stream, {rows, hidden}, "[n, H]");
  }
  check->that(stream == t || stream == TE3_FLOAT32,
              adds ? "residual: must be float32 or of y's type" : "x: must be float32 or of y's type");
  check->that(a.x.dtype == t || (stream == TE3_FLOAT32 && a.x.dtype == TE3_FLOAT32),
              "x: must be of y's type, or float32 beside a float32 residual");
  check->that(fits_int(rows) && hidden > 0 && fits_int(hidden), "x: rows and H must be positive 32-bit numbers");
  AddRmsNormParams p = {};
  p.x = a.x.data;
  p.residual = a.residual.data;
  p.weight = a.weight.data;
  p.y = a.y.data;
  p.sum = a.sum.data;
  p.num_rows = static_cast<int32_t>(rows);
  p.hidden = static_cast<int32_t>(hidden);
  p.epsilon = a.epsilon;
  p.weight_offset = a.weight_offset;
  p.dtype = dtype_of(a.y);
  p.x_dtype = dtype_of(a.x);
  p.residual_dtype = static_cast<DType>(stream);
  return p;
}

AddLayerNormParams add_layer_norm_params(const te3_add_layer_norm_args& a, Check* check) {
  const int32_t t = a.x.dtype;
  const bool adds = a.residual.data != nullptr;
  check->floating("x", a.x);
  check->tensor("x", a.x, t, {kAny, kAny}, "[n, H]");
  if (!check->ok()) return {};
  const int64_t rows = a.x.shape[0], hidden = a.x.shape[1];
  check->tensor("weight", a.weight, t, {hidden}, "[H]");
  check->tensor("bias", a.bias, t, {hidden}, "[H]");
  check->tensor("y", a.y, t, {rows, hidden}, "[n, H]");
  check->that(adds == (a.sum.data != nullptr), "residual and sum: give both or neither");
  if (adds) {
    check->tensor("residual", a.residual, t, {rows, hidden}, "[n, H]");
    check->tensor("sum", a.sum, t, {rows, hidden}, "[n, H]");
  }
  check->that(fits_int(rows) && hidden > 0 && fits_int(hidden), "x: rows and H must be positive 32-bit numbers");
  AddLayerNormParams p = {};
  p.x = a.x.data;
  p.residual = a.residual.data;
  p.weight = a.weight.data;
  p.bias = a.bias.data;
  p.y = a.y.data;
  p.sum = a.sum.data;
  p.num_rows = static_cast<int32_t>(rows);
  p.hidden = static_cast<int32_t>(hidden);
  p.epsilon = a.epsilon;
  p.dtype = dtype_of(a.x);
  return p;
}

SiluMulParams silu_mul_params(const te3_silu_mul_args& a, Check* check) {
  check->floating("gate_up", a.gate_up);
  check->tensor("gate_up", a.gate_up, a.gate_up.dtype, {kAny, kAny}, "[n, 2 * width]");
  if (!check->ok()) return {};
  const int64_t rows = a.gate_up.shape[0], both = a.gate_up.shape[1];
  check->that(both % 2 == 0, [&] { return "gate_up: expected an even width, got " + Check::text(a.gate_up); });
  check->tensor("out", a.out, a.gate_up.dtype, {rows, both / 2}, "[n, width]");
  check->that(rows <= 65535, [&] { return "gate_up: at most 65535 rows, got " + std::to_string(rows); });
  check->that(both > 0 && fits_int(both), "gate_up: width must be a positive 32-bit number");
  SiluMulParams p = {};
  p.gate_up = a.gate_up.data;
  p.out = a.out.data;
  p.num_rows = static_cast<int32_t>(rows);
  p.width = static_cast<int32_t>(both / 2);
  p.dtype = dtype_of(a.gate_up);
  return p;
}

LinearParams linear_params(const te3_linear_args& a, Check* check) {
  const int32_t t = a.x.dtype;
  check->floating("x", a.x);
  check->tensor("x", a.x, t, {kAny, kAny}, "[M, K]");
  if (!check->ok()) return {};
  check->tensor("weight", a.weight, t, {kAny, a.x.shape[1]}, "[N, K]");
  check->tensor("y", a.y, t, {a.x.shape[0], a.weight.shape[0]}, "[M, N]");
  check->that(fits_int(a.x.shape[0]) && fits_int(a.x.shape[1]) && fits_int(a.weight.shape[0]),
              "x and weight: M, K and N must be 32-bit numbers");
  check->that(a.y.data != a.x.data, "y: must not be x's memory");
  LinearParams p = {};
  p.x = a.x.data;
  p.weight = a.weight.data;
  p.y = a.y.data;
  p.num_rows = static_cast<int32_t>(a.x.shape[0]);
  p.inner = static_cast<int32_t>(a.x.shape[1]);
  p.outer = static_cast<int32_t>(a.weight.shape[0]);
  p.prefetch_safe = a.prefetch_safe;
  p.dtype = dtype_of(a.x);
  return p;
}

VisionAttentionParams vision_attention_params(const te3_vision_attention_args& a, Check* check) {
  const int32_t t = a.qkv.dtype;
  check->floating("qkv", a.qkv);
  check->tensor("qkv", a.qkv, t, {kAny, kAny}, "[n, 3 * H * D]");
  check->that(a.num_heads > 0 && a.num_heads <= 65535, "num_heads: must be positive, at most 65535");
  if (!check->ok()) return {};
  const int64_t patches = a.qkv.shape[0], heads = a.num_heads, dim = a.qkv.shape[1] / (3 * heads);
  check->that(a.qkv.shape[1] == 3 * heads * dim && dim > 0 && dim % 4 == 0 && dim <= 128, [&] {
    return "qkv: expected 3 * num_heads * head_dim columns, head_dim a multiple of 4 and at most 128, got " +
           Check::text(a.qkv) + " with num_heads " + std::to_string(heads);
  });
  check->tensor("rope_positions", a.rope_positions, TE3_INT32, {2, patches}, "[2, n]");
  check->tensor("inv_freq", a.inv_freq, TE3_FLOAT32, {dim / 2}, "[D / 2]");
  check->tensor("pair_axis", a.pair_axis, TE3_INT32, {dim / 2}, "[D / 2]");
  check->tensor("frame_starts", a.frame_starts, TE3_INT32, {kAny}, "[F + 1]");
  check->tensor("out", a.out, t, {patches, heads * dim}, "[n, H * D]");
  if (!check->ok()) return {};
  const int64_t frames = a.frame_starts.shape[0] - 1;
  check->that(frames >= 1,
              [&] { return "frame_starts: expected [F + 1], F at least 1, got " + Check::text(a.frame_starts); });
  check->that(fits_int(patches + 8 * frames), "qkv: too many patches");
  check->that(a.path >= TE3_PATH_AUTO && a.path <= TE3_PATH_WGMMA,
              [&] { return "path: unknown " + std::to_string(a.path); });
  check->that(a.scale > 0.0f && std::isfinite(a.scale),
              [&] { return "scale: must be positive, got " + std::to_string(a.scale); });
  VisionAttentionParams p = {};
  p.qkv = a.qkv.data;
  p.rope_positions = ints(a.rope_positions);
  p.inv_freq = static_cast<const float*>(a.inv_freq.data);
  p.pair_axis = ints(a.pair_axis);
  p.frame_starts = ints(a.frame_starts);
  p.out = a.out.data;
  p.num_patches = static_cast<int32_t>(patches);
  p.num_frames = static_cast<int32_t>(frames);
  p.num_heads = a.num_heads;
  p.head_dim = static_cast<int32_t>(dim);
  p.scale = a.scale;
  p.dtype = dtype_of(a.qkv);
  p.path = static_cast<AttentionPath>(a.path);
  return p;
}

KVMoveParams kv_move_params(const te3_kv_move_args& a, Check* check) {
  const int32_t t = a.cache.dtype;
  if (t != TE3_UINT8 && t != TE3_INT32) check->floating("cache", a.cache);
  check->tensor("cache", a.cache, t, {kAny, kAny, kAny, kAny}, "[planes, slots, Hkv, D]");
  check->tensor("source", a.source, TE3_INT32, {kAny, kAny}, "[B, K]");
  if (!check->ok()) return {};
  const int64_t batch = a.source.shape[0], moves = a.source.shape[1];
  const int64_t item_bytes = t == TE3_UINT8 ? 1 : t == TE3_FLOAT32 || t == TE3_INT32 ? 4 : 2;
  const int64_t row_bytes = a.cache.shape[2] * a.cache.shape[3] * item_bytes;
  check->that(reinterpret_cast<uintptr_t>(a.cache.data) % 16 == 0, "cache: data must be aligned to 16 bytes");
  check->tensor("destination", a.destination, TE3_INT32, {batch, moves}, "[B, K]");
  if (a.page_table.data != nullptr) {
    check->tensor("page_table", a.page_table, TE3_INT32, {batch, kAny}, "[B, P]");
    check->that(a.page_size > 0, [&] { return "page_size: must be positive, got " + std::to_string(a.page_size); });
  }
  check->that(row_bytes > 0 && row_bytes % 16 == 0 && fits_int(row_bytes), [&] {
    return "cache: a row (Hkv * D) must be a multiple of 16 bytes, got " + std::to_string(row_bytes);
  });
  check->that(a.cache.shape[0] <= 65535, [&] { return "cache: at most 65535 planes, got " + Check::text(a.cache); });
  check->that(batch * moves <= kMaxKVMoves, [&] {
    return "source: at most " + std::to_string(kMaxKVMoves) + " moves, got " + Check::text(a.source);
  });
  if (!check->ok()) return {};
  KVMoveParams p = {};
  p.cache = a.cache.data;
  p.source = ints(a.source);
  p.destination = ints(a.destination);
  p.page_table = ints(a.page_table);
  p.slots = a.cache.shape[1];
  p.planes = static_cast<int32_t>(a.cache.shape[0]);
  p.row_bytes = static_cast<int32_t>(row_bytes);
  p.batch = static_cast<int32_t>(batch);
  p.num_moves = static_cast<int32_t>(moves);
  p.pages_per_row = a.page_table.data != nullptr ? static_cast<int32_t>(a.page_table.shape[1]) : 0;
  p.page_size = a.page_size;
  return p;
}

}  // namespace trt_eagle3
