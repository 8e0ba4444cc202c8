// Arguments of the kernels of a layer's dense products.
#include <climits>

#include "arguments.h"

namespace trt_eagle3 {
namespace {

constexpr int64_t kColumns = 128, kRows = 16;  // of K and N: a multiple
constexpr int64_t kMaxBytes = int64_t{1} << 32;  // of a weight: its places are 32-bit numbers

DType floating_type(const te3_tensor& t) { return static_cast<DType>(t.dtype); }

void check_multiple(const char* name, int64_t size, int64_t of, Check* check) {
  check->that(size > 0 && size <= INT_MAX / 2 && size % of == 0, [&] {
    return std::string(name) + ": must be a positive multiple of " + std::to_string(of) + ", got " +
           std::to_string(size);
  });
}

// A weight [outer, inner] of `dtype`, with `per` numbers in an element.
void check_weight(const char* name, const te3_tensor& t, int32_t dtype, int64_t outer, int64_t inner, int64_t per,
                  Check* check) {
  check->tensor(name, t, dtype, {outer, inner / per}, "[N, K]");
  check->that(reinterpret_cast<uintptr_t>(t.data) % 16 == 0,
              [&] { return std::string(name) + ": data must be aligned to 16 bytes"; });
  check->that(outer * inner / per * (per == 1 ? 1 : 4) < kMaxBytes,
              [&] { return std::string(name) + ": must be smaller than 4 GiB, got " + Check::text(t); });
}

// Everything but scales. Weights are of `dtype`, with `per` numbers in an element. Whether there is a next layer.
template <typename Args, typename Params>
bool set_layer(const Args& a, int32_t dtype, int64_t per, Params* p, Check* check) {
  check->floating("x", a.x);
  check->tensor("x", a.x, a.x.dtype, {kAny, kAny}, "[M, A]");
  check->tensor("residual", a.residual, a.x.dtype, {a.x.shape[0], kAny}, "[M, H]");
  check->shape_of("gate_up", a.gate_up, dtype, {kAny, kAny}, "[2 * I, H]");
  if (!check->ok()) return false;
  const bool next = a.next_norm.data != nullptr;
  const int64_t rows = a.x.shape[0], attended = a.x.shape[1], hidden = a.residual.shape[1];
  const int64_t width = a.gate_up.shape[0] / 2;
  check->that(rows <= INT_MAX, "x: M must be a 32-bit number");
  check_multiple("A", attended, kColumns, check);
  check_multiple("H", hidden, kColumns, check);
  check_multiple("I", width, kColumns, check);
  check->tensor("norm", a.norm, a.x.dtype, {hidden}, "[H]");
  check_weight("o", a.o, dtype, hidden, attended, per, check);
  check_weight("gate_up", a.gate_up, dtype, 2 * width, hidden, per, check);
  check_weight("down", a.down, dtype, hidden, width, per, check);
  check->that(next == (a.qkv.data != nullptr) && next == (a.y.data != nullptr),
              "next_norm, qkv and y: give all or none");
  int64_t next_width = 0;
  if (check->ok() && next) {
    check->tensor("next_norm", a.next_norm, a.x.dtype, {hidden}, "[H]");
    check->shape_of("qkv", a.qkv, dtype, {kAny, kAny}, "[N, H]");
    if (!check->ok()) return false;
    next_width = a.qkv.shape[0];
    check_multiple("N", next_width, kRows, check);
    check_weight("qkv", a.qkv, dtype, next_width, hidden, per, check);
    check->tensor("y", a.y, a.x.dtype, {rows, next_width}, "[M, N]");
  }
  check->tensor("barrier", a.barrier, TE3_INT32, {1}, "[1]");
  check->tensor("middle", a.middle, a.x.dtype, {rows, hidden}, "[M, H]");
  check->tensor("inner", a.inner, a.x.dtype, {rows, width}, "[M, I]");
  check->tensor("total", a.total, a.x.dtype, {rows, hidden}, "[M, H]");
  check->that(a.slots == 0 || a.slots >= 2, [&] { return "slots: expected 0, or 2 or more, got " + std::to_string(a.slots); });
  const void* written[] = {a.middle.data, a.inner.data, a.total.data, a.y.data};
  for (int i = 0; i < 4; ++i) {
    bool alone = written[i] == nullptr || (written[i] != a.x.data && written[i] != a.residual.data);
    for (int j = 0; j < i; ++j) alone = alone && (written[i] == nullptr || written[i] != written[j]);
    check->that(alone, "middle, inner, total, y: each needs memory of its own");
  }
  p->x = a.x.data;
  p->residual = a.residual.data;
  p->norm = a.norm.data;
  p->next_norm = a.next_norm.data;
  p->o = static_cast<decltype(p->o)>(a.o.data);
  p->gate_up = static_cast<decltype(p->gate_up)>(a.gate_up.data);
  p->down = static_cast<decltype(p->down)>(a.down.data);
  p->qkv = static_cast<decltype(p->qkv)>(a.qkv.data);
  p->barrier = static_cast<int32_t*>(a.barrier.data);
  p->middle = a.middle.data;
  p->inner = a.inner.data;
  p->total = a.total.data;
  p->y = a.y.data;
  p->num_rows = static_cast<int32_t>(rows);
  p->attended = static_cast<int32_t>(attended);
  p->hidden = static_cast<int32_t>(hidden);
  p->width = static_cast<int32_t>(width);
  p->next_width = static_cast<int32_t>(next_width);
  p->dtype = floating_type(a.x);
  p->epsilon = a.epsilon;
  p->weight_offset = a.weight_offset;
  p->slots = a.slots;
  p->prefetch_safe = a.prefetch_safe;
  return next && check->ok();
}

void check_groups(const std::string& name, const te3_tensor& scale, const te3_tensor& zero_point, int32_t dtype,
                  int64_t outer, int64_t inner, Check* check) {
  check->tensor((name + "_scale").c_str(), scale, dtype, {outer, inner / kColumns}, "[N, K / 128]");
  if (zero_point.data == nullptr) return;
  check->tensor((name + "_zero_point").c_str(), zero_point, TE3_UINT8, {outer, inner / kColumns}, "[N, K / 128]");
}

void check_byte_scale(const std::string& name, const te3_tensor& scale, int64_t outer, int64_t inner, int32_t* rows,
                      int32_t* columns, Check* check) {
  check->tensor((name + "_scale").c_str(), scale, TE3_FLOAT32, {kAny, kAny}, "[rows, columns]");
  if (!check->ok()) return;
  const int64_t r = scale.shape[0], c = scale.shape[1];
  check->that((r == outer || r == (outer + kColumns - 1) / kColumns || r == 1) && (c == 1 || c == inner / kColumns), [&] {
    return name + "_scale: expected N, ceil(N / 128) or 1 rows and 1 or K / 128 columns of N = " +
           std::to_string(outer) + ", K = " + std::to_string(inner) + ", got " + Check::text(scale);
  });
  *rows = static_cast<int32_t>(r);
  *columns = static_cast<int32_t>(c);
}

}  // namespace

DenseLayerInt4Params dense_layer_int4_params(const te3_dense_layer_int4_args& a, Check* check) {
  DenseLayerInt4Params p = {};
  const bool next = set_layer(a, TE3_INT32, 8, &p, check);
  const int32_t dtype = a.o_scale.dtype;
  check->that(dtype == TE3_FLOAT16 || dtype == TE3_BFLOAT16, "o_scale: expected float16 or bfloat16");
  check_groups("o", a.o_scale, a.o_zero_point, dtype, p.hidden, p.attended, check);
  check_groups("gate_up", a.gate_up_scale, a.gate_up_zero_point, dtype, 2 * int64_t{p.width}, p.hidden, check);
  check_groups("down", a.down_scale, a.down_zero_point, dtype, p.hidden, p.width, check);
  if (next) check_groups("qkv", a.qkv_scale, a.qkv_zero_point, dtype, p.next_width, p.hidden, check);
  p.o_scale = a.o_scale.data;
  p.o_zero_point = a.o_zero_point.data;
  p.gate_up_scale = a.gate_up_scale.data;
  p.gate_up_zero_point = a.gate_up_zero_point.data;
  p.down_scale = a.down_scale.data;
  p.down_zero_point = a.down_zero_point.data;
  p.qkv_scale = a.qkv_scale.data;
  p.qkv_zero_point = a.qkv_zero_point.data;
  p.scale_dtype = floating_type(a.o_scale);
  return p;
}

DenseLayerFp8Params dense_layer_fp8_params(const te3_dense_layer_fp8_args& a, Check* check) {
  DenseLayerFp8Params p = {};
  const bool next = set_layer(a, TE3_FLOAT8_E4M3FN, 1, &p, check);
  check_byte_scale("o", a.o_scale, p.hidden, p.attended, &p.o_scale_rows, &p.o_scale_columns, check);
  check_byte_scale("gate_up", a.gate_up_scale, 2 * int64_t{p.width}, p.hidden, &p.gate_up_scale_rows,
                   &p.gate_up_scale_columns, check);
  check_byte_scale("down", a.down_scale, p.hidden, p.width, &p.down_scale_rows, &p.down_scale_columns, check);
  if (next) {
    check_byte_scale("qkv", a.qkv_scale, p.next_width, p.hidden, &p.qkv_scale_rows, &p.qkv_scale_columns, check);
  }
  p.o_scale = static_cast<const float*>(a.o_scale.data);
  p.gate_up_scale = static_cast<const float*>(a.gate_up_scale.data);
  p.down_scale = static_cast<const float*>(a.down_scale.data);
  p.qkv_scale = static_cast<const float*>(a.qkv_scale.data);
  return p;
}

}  // namespace trt_eagle3
