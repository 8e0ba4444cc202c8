// Arguments of the kernels of recurrent layers.
#include <climits>
#include <cmath>

#include "arguments.h"

namespace trt_eagle3 {
namespace {

constexpr int64_t kTreeRows = 64;  // of which what brings states further is kept

const int32_t* ints(const te3_tensor& t) { return static_cast<const int32_t*>(t.data); }
const float* floats(const te3_tensor& t) { return static_cast<const float*>(t.data); }
int32_t small(int64_t x) { return static_cast<int32_t>(x); }

// The sizes of a launch, of tensors whose ranks are checked.
struct DeltaSizes {
  int64_t batch, num_new, tail, kept, entries, key_heads, value_heads, key_dim, value_dim, channels, taps;

  int64_t values() const { return value_heads * value_dim; }
  int64_t row_width() const { return key_heads * key_dim + values() + 2 * value_heads; }
};

DeltaSizes sizes_of(const te3_gated_delta_args& a) {
  DeltaSizes n = {};
  n.batch = a.tree_mask.shape[0];
  n.num_new = a.tree_mask.shape[1];
  n.tail = a.tree_mask.shape[2];
  n.kept = n.num_new < kTreeRows ? n.num_new : kTreeRows;
  n.entries = a.delta_state.shape[0];
  n.key_heads = a.num_k_heads;
  n.value_heads = a.num_v_heads;
  n.key_dim = a.delta_state.shape[2];
  n.value_dim = a.delta_state.shape[3];
  n.channels = 2 * n.key_heads * n.key_dim + n.values();
  n.taps = a.conv_weight.shape[2];
  return n;
}

void check_tensors(const te3_gated_delta_args& a, const DeltaSizes& n, Check* check) {
  const int32_t t = a.qkvz.dtype;
  const int64_t rows = n.batch * n.num_new;
  check->tensor("qkvz", a.qkvz, t, {rows, n.channels + n.values()}, "[B * S, C + Hv * Dv]");
  check->tensor("ba", a.ba, t, {rows, 2 * n.value_heads}, "[B * S, 2 * Hv]");
  check->tensor("conv_weight", a.conv_weight, t, {n.channels, 1, n.taps}, "[C, 1, W]");
  check->tensor("a_log", a.a_log, TE3_FLOAT32, {n.value_heads}, "[Hv]");
  check->tensor("dt_bias", a.dt_bias, TE3_FLOAT32, {n.value_heads}, "[Hv]");
  check->tensor("norm", a.norm, t, {n.value_dim}, "[Dv]");
  check->tensor("conv_state", a.conv_state, t, {n.entries, n.taps - 1, n.channels}, "[E, W - 1, C]");
  check->data_of("delta_state", a.delta_state);
  check->tensor("state_reads", a.state_reads, TE3_INT32, {n.batch}, "[B]");
  check->tensor("state_writes", a.state_writes, TE3_INT32, {n.batch}, "[B]");
  check->tensor("certain", a.certain, TE3_INT32, {n.batch}, "[B]");
  check->data_of("tree_mask", a.tree_mask);
  check->tensor("out", a.out, t, {rows, n.values()}, "[B * S, Hv * Dv]");
  check->tensor("conv_rows", a.conv_rows, t, {n.batch, n.kept, n.channels}, "[B, min(S, 64), C]");
  check->tensor("delta_rows", a.delta_rows, TE3_FLOAT32, {n.batch, n.kept, n.row_width()},
                "[B, min(S, 64), Hk * Dk + Hv * Dv + 2 * Hv]");
}

// state [.., E, ..], rows [L, B, T, ..], entries [B] and path [B, K]; `entries`: L * E.
template <typename Args, typename Params>
void check_commit(const Args& a, int64_t entries, Params* p, Check* check) {
  const int64_t layers = a.rows.shape[0], batch = a.rows.shape[1];
  check->data_of("rows", a.rows);
  check->tensor("entries", a.entries, TE3_INT32, {batch}, "[B]");
  check->tensor("path", a.path, TE3_INT32, {batch, kAny}, "[B, K]");
  check->that(layers > 0 && entries % layers == 0, [&] {
    return "state: expected as many entries in each of " + std::to_string(layers) + " layers, got " +
           std::to_string(entries) + " in all";
  });
  check->that(layers * batch <= 65535,
              [&] { return "rows: at most 65535 layers times sequences, got " + std::to_string(layers * batch); });
  if (!check->ok()) return;
  p->state = static_cast<decltype(p->state)>(a.state.data);
  p->rows = static_cast<decltype(p->rows)>(a.rows.data);
  p->entries = ints(a.entries);
  p->path = ints(a.path);
  p->num_layers = small(layers);
  p->num_entries = small(entries / layers);
  p->batch = small(batch);
  p->num_rows = small(a.rows.shape[2]);
  p->num_moves = small(a.path.shape[1]);
}

}  // namespace

GatedDeltaParams gated_delta_params(const te3_gated_delta_args& a, Check* check) {
  check->floating("qkvz", a.qkvz);
  check->that(a.num_k_heads > 0 && a.num_v_heads > 0 && a.num_v_heads % a.num_k_heads == 0, [&] {
    return "num_v_heads: expected a multiple of num_k_heads, got " + std::to_string(a.num_v_heads) + " and " +
           std::to_string(a.num_k_heads);
  });
  check->shape_of("tree_mask", a.tree_mask, TE3_BOOL, {kAny, kAny, kAny}, "[B, S, M]");
  check->shape_of("delta_state", a.delta_state, TE3_FLOAT32, {kAny, a.num_v_heads, kAny, kAny}, "[E, Hv, Dk, Dv]");
  check->shape_of("conv_weight", a.conv_weight, a.qkvz.dtype, {kAny, 1, kAny}, "[C, 1, W]");
  if (!check->ok()) return {};
  const DeltaSizes n = sizes_of(a);
  check->that(n.tail >= n.num_new, [&] { return "tree_mask: M must be at least S, got " + Check::text(a.tree_mask); });
  check->that(n.taps > 1 && n.key_dim > 0 && n.value_dim > 0,
              "conv_weight and delta_state: W must be at least 2, Dk and Dv positive");
  check->that(a.epsilon >= 0.0f && std::isfinite(a.epsilon),
              [&] { return "epsilon: must not be negative, got " + std::to_string(a.epsilon); });
  check->that(a.blocks_per_head >= 0 && a.chunk_rows >= 0, "blocks_per_head and chunk_rows: must not be negative");
  check->that(n.batch <= 65535 && n.value_heads <= 65535 && n.batch * n.num_new <= INT_MAX && n.entries <= INT_MAX &&
                  n.channels + n.values() <= INT_MAX,
              "sizes: B and Hv at most 65535; B * S, E and C + Hv * Dv must fit 32 bits");
  check_tensors(a, n, check);
  check->that(a.out.data != a.qkvz.data, "out: must not be qkvz's memory");
  GatedDeltaParams p = {};
  p.qkvz = a.qkvz.data;
  p.ba = a.ba.data;
  p.conv_weight = a.conv_weight.data;
  p.a_log = floats(a.a_log);
  p.dt_bias = floats(a.dt_bias);
  p.norm = a.norm.data;
  p.conv_state = a.conv_state.data;
  p.delta_state = static_cast<float*>(a.delta_state.data);
  p.state_reads = ints(a.state_reads);
  p.state_writes = ints(a.state_writes);
  p.certain = ints(a.certain);
  p.tree_mask = static_cast<const uint8_t*>(a.tree_mask.data);
  p.out = a.out.data;
  p.conv_rows = a.conv_rows.data;
  p.delta_rows = static_cast<float*>(a.delta_rows.data);
  p.batch = small(n.batch);
  p.num_new = small(n.num_new);
  p.tail = small(n.tail);
  p.kept = small(n.kept);
  p.channels = small(n.channels);
  p.key_dim = small(n.key_dim);
  p.value_dim = small(n.value_dim);
  p.taps = small(n.taps);
  p.dtype = static_cast<DType>(a.qkvz.dtype);
  p.num_k_heads = a.num_k_heads;
  p.num_v_heads = a.num_v_heads;
  p.epsilon = a.epsilon;
  p.blocks_per_head = a.blocks_per_head;
  p.chunk_rows = a.chunk_rows;
  p.prefetch_safe = a.prefetch_safe;
  return p;
}

CommitDeltaParams commit_delta_params(const te3_commit_delta_args& a, Check* check) {
  CommitDeltaParams p = {};
  check->tensor("state", a.state, TE3_FLOAT32, {kAny, kAny, kAny, kAny}, "[L * E, Hv, Dk, Dv]");
  check->shape_of("rows", a.rows, TE3_FLOAT32, {kAny, kAny, kAny, kAny}, "[L, B, T, any]");
  if (!check->ok()) return p;
  const int64_t heads = a.state.shape[1], key_dim = a.state.shape[2], value_dim = a.state.shape[3];
  const int64_t keys = a.rows.shape[3] - heads * (value_dim + 2);
  check->that(heads > 0 && key_dim > 0 && keys > 0 && keys % key_dim == 0 && heads % (keys / key_dim) == 0, [&] {
    return "rows: expected [L, B, T, Hk * Dk + Hv * Dv + 2 * Hv] for state's " + Check::text(a.state) + ", got " +
           Check::text(a.rows);
  });
  check_commit(a, a.state.shape[0], &p, check);
  if (!check->ok()) return p;
  p.num_k_heads = small(keys / key_dim);
  p.num_v_heads = small(heads);
  p.key_dim = small(key_dim);
  p.value_dim = small(value_dim);
  return p;
}

CommitWindowParams commit_window_params(const te3_commit_window_args& a, Check* check) {
  CommitWindowParams p = {};
  check->floating("state", a.state);
  check->tensor("state", a.state, a.state.dtype, {kAny, kAny, kAny, kAny}, "[L, E, W - 1, C]");
  check->shape_of("rows", a.rows, a.state.dtype, {kAny, kAny, kAny, a.state.shape[3]}, "[L, B, T, C]");
  if (!check->ok()) return p;
  check->that(a.rows.shape[0] == a.state.shape[0], [&] {
    return "rows: expected " + std::to_string(a.state.shape[0]) + " layers, got " + Check::text(a.rows);
  });
  check_commit(a, a.state.shape[0] * a.state.shape[1], &p, check);
  p.width = small(a.state.shape[2]);
  p.channels = small(a.state.shape[3]);
  p.dtype = static_cast<DType>(a.state.dtype);
  return p;
}

}  // namespace trt_eagle3
