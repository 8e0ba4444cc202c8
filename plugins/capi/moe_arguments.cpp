// Arguments of the kernels of a mixture of experts.
#include <climits>

#include "arguments.h"

namespace trt_eagle3 {
namespace {

constexpr int64_t kSpan = 128;  // of H and I: a multiple, where experts are packed
constexpr int64_t kMaxExperts = 512, kMaxTopK = 16, kMaxSlots = 1024, kChunk = 64;

DType floating_type(const te3_tensor& t) { return static_cast<DType>(t.dtype); }

void check_top_k(int64_t experts, int64_t top_k, Check* check) {
  check->that(experts <= kMaxExperts, [&] {
    return "router_logits: at most " + std::to_string(kMaxExperts) + " experts, got " + std::to_string(experts);
  });
  check->that(top_k > 0 && top_k <= kMaxTopK && top_k <= experts, [&] {
    return "top_k: expected 1 to " + std::to_string(kMaxTopK) + " and no more than the " + std::to_string(experts) +
           " experts, got " + std::to_string(top_k);
  });
}

void check_multiple(const char* name, int64_t size, int64_t of, Check* check) {
  check->that(size > 0 && size % of == 0, [&] {
    return std::string(name) + ": must be a positive multiple of " + std::to_string(of) + ", got " +
           std::to_string(size);
  });
}

// x [n, H]; returns H.
int64_t check_x(const te3_tensor& x, int64_t multiple, Check* check) {
  check->floating("x", x);
  check->tensor("x", x, x.dtype, {kAny, kAny}, "[n, H]");
  if (check->ok()) check_multiple("H", x.shape[1], multiple, check);
  return x.shape[1];
}

// Everything but weights and x's shape; `experts` and I are known.
template <typename Args, typename Params>
void set_rows(const Args& a, int64_t experts, int64_t width, Params* p, Check* check) {
  const int64_t rows = a.x.shape[0], hidden = a.x.shape[1];
  check->tensor("router_logits", a.router_logits, a.x.dtype, {rows, experts}, "[n, E]");
  check->tensor("y", a.y, a.x.dtype, {rows, hidden}, "[n, H]");
  check_top_k(experts, a.top_k, check);
  check->that(rows <= INT_MAX && hidden <= INT_MAX && 2 * width <= INT_MAX, "sizes: n, H and 2 * I must fit 32 bits");
  check->that(a.y.data != a.x.data && a.y.data != a.router_logits.data, "y: must not be an input's memory");
  p->x = a.x.data;
  p->router_logits = a.router_logits.data;
  p->gate_up = static_cast<decltype(p->gate_up)>(a.gate_up.data);
  p->down = static_cast<decltype(p->down)>(a.down.data);
  p->y = a.y.data;
  p->num_rows = static_cast<int32_t>(rows);
  p->num_experts = static_cast<int32_t>(experts);
  p->hidden = static_cast<int32_t>(hidden);
  p->width = static_cast<int32_t>(width);
  p->dtype = floating_type(a.x);
  p->top_k = a.top_k;
  p->renormalise = a.renormalise != 0;
}

// gate_up [E, 2 I, H / per] and down [E, H, I / per], with `per` numbers in an element; returns I.
int64_t check_experts(const te3_tensor& gate_up, const te3_tensor& down, int32_t dtype, int64_t hidden, int64_t per,
                      Check* check) {
  if (!check->ok()) return 0;
  check->tensor("gate_up", gate_up, dtype, {kAny, kAny, hidden / per}, "[E, 2 * I, H]");
  if (!check->ok()) return 0;
  const int64_t width = gate_up.shape[1] / 2;
  check->that(gate_up.shape[1] % 2 == 0 && width > 0 && gate_up.shape[0] > 0,
              [&] { return "gate_up: expected [E, 2 * I, H], got " + Check::text(gate_up); });
  check->tensor("down", down, dtype, {gate_up.shape[0], hidden, width / per}, "[E, H, I]");
  for (const te3_tensor* t : {&gate_up, &down}) {
    check->that(reinterpret_cast<uintptr_t>(t->data) % 16 == 0, "gate_up and down: data must be aligned to 16 bytes");
  }
  return width;
}

// Of a weight [E, N, K].
void check_byte_scale(const char* name, const te3_tensor& scale, int64_t experts, int64_t outer, int64_t inner,
                      int32_t* rows, int32_t* columns, Check* check) {
  check->tensor(name, scale, TE3_FLOAT32, {experts, kAny, kAny}, "[E, rows, columns]");
  if (!check->ok()) return;
  const int64_t r = scale.shape[1], c = scale.shape[2];
  check->that((r == outer || r == (outer + kSpan - 1) / kSpan || r == 1) && (c == 1 || c == inner / kSpan), [&] {
    return std::string(name) + ": expected N, ceil(N / 128) or 1 rows and 1 or K / 128 columns of N = " +
           std::to_string(outer) + ", K = " + std::to_string(inner) + ", got " + Check::text(scale);
  });
  *rows = static_cast<int32_t>(r);
  *columns = static_cast<int32_t>(c);
}

void check_groups(const char* name, const te3_tensor& scale, const te3_tensor& zero_point, int32_t dtype,
                  int64_t experts, int64_t outer, int64_t inner, int64_t group, Check* check) {
  check->tensor(name, scale, dtype, {experts, outer, inner / group}, "[E, N, K / group]");
  if (zero_point.data == nullptr) return;
  check->tensor("zero_point", zero_point, TE3_UINT8, {experts, outer, inner / group}, "[E, N, K / group]");
}

}  // namespace

FusedMoeParams fused_moe_params(const te3_fused_moe_args& a, Check* check) {
  FusedMoeParams p = {};
  const int64_t hidden = check_x(a.x, 16, check);
  const int64_t width = check_experts(a.gate_up, a.down, a.x.dtype, hidden, 1, check);
  if (check->ok()) set_rows(a, a.gate_up.shape[0], width, &p, check);
  if (!check->ok()) return p;
  check_multiple("I", width, 8, check);
  return p;
}

FusedMoeFp8Params fused_moe_fp8_params(const te3_fused_moe_fp8_args& a, Check* check) {
  FusedMoeFp8Params p = {};
  const int64_t hidden = check_x(a.x, kSpan, check);
  const int64_t width = check_experts(a.gate_up, a.down, TE3_FLOAT8_E4M3FN, hidden, 1, check);
  if (check->ok()) set_rows(a, a.gate_up.shape[0], width, &p, check);
  if (!check->ok()) return p;
  check_multiple("I", width, kSpan, check);
  const int64_t experts = p.num_experts;
  check_byte_scale("gate_up_scale", a.gate_up_scale, experts, 2 * width, hidden, &p.gate_up_scale_rows,
                   &p.gate_up_scale_columns, check);
  check_byte_scale("down_scale", a.down_scale, experts, hidden, width, &p.down_scale_rows, &p.down_scale_columns,
                   check);
  p.gate_up_scale = static_cast<const float*>(a.gate_up_scale.data);
  p.down_scale = static_cast<const float*>(a.down_scale.data);
  return p;
}

FusedMoeInt4Params fused_moe_int4_params(const te3_fused_moe_int4_args& a, Check* check) {
  FusedMoeInt4Params p = {};
  const int64_t hidden = check_x(a.x, kSpan, check);
  const int64_t width = check_experts(a.gate_up, a.down, TE3_INT32, hidden, 8, check);
  if (check->ok()) set_rows(a, a.gate_up.shape[0], width, &p, check);
  if (!check->ok()) return p;
  check_multiple("I", width, kSpan, check);
  const int32_t dtype = a.gate_up_scale.dtype;
  const int64_t groups = a.gate_up_scale.rank == 3 ? a.gate_up_scale.shape[2] : 0;
  const int64_t group = groups > 0 ? hidden / groups : 0;
  check->that(dtype == TE3_FLOAT16 || dtype == TE3_BFLOAT16, "gate_up_scale: expected float16 or bfloat16");
  check->that((group == 32 || group == 64 || group == 128) && group * groups == hidden, [&] {
    return "gate_up_scale: expected one for each 32, 64 or 128 columns of H = " + std::to_string(hidden) + ", got " +
           Check::text(a.gate_up_scale);
  });
  check->that((a.gate_up_zero_point.data == nullptr) == (a.down_zero_point.data == nullptr),
              "down_zero_point: expected where gate_up_zero_point is, and only there");
  if (!check->ok()) return p;
  const int64_t experts = p.num_experts;
  check_groups("gate_up_scale", a.gate_up_scale, a.gate_up_zero_point, dtype, experts, 2 * width, hidden, group, check);
  check_groups("down_scale", a.down_scale, a.down_zero_point, dtype, experts, hidden, width, group, check);
  p.gate_up_scale = a.gate_up_scale.data;
  p.down_scale = a.down_scale.data;
  p.gate_up_zero_point = a.gate_up_zero_point.data;
  p.down_zero_point = a.down_zero_point.data;
  p.group = static_cast<int32_t>(group);
  p.scale_dtype = floating_type(a.gate_up_scale);
  return p;
}

RouteRowsParams route_rows_params(const te3_route_rows_args& a, Check* check) {
  RouteRowsParams p = {};
  check->floating("router_logits", a.router_logits);
  check->tensor("router_logits", a.router_logits, a.router_logits.dtype, {kAny, kAny}, "[n, E]");
  if (!check->ok()) return p;
  const int64_t rows = a.router_logits.shape[0], experts = a.router_logits.shape[1];
  check->tensor("experts", a.experts, TE3_INT32, {rows, kAny}, "[n, k]");
  if (!check->ok()) return p;
  const int64_t top_k = a.experts.shape[1];
  check_top_k(experts, top_k, check);
  check->tensor("shares", a.shares, TE3_FLOAT32, {rows, top_k}, "[n, k]");
  check->tensor("places", a.places, TE3_INT32, {rows, top_k}, "[n, k]");
  check->tensor("counts", a.counts, TE3_INT32, {(rows + kChunk - 1) / kChunk, experts}, "[ceil(n / 64), E]");
  check->that(rows * top_k <= INT_MAX, "router_logits: n * k must fit 32 bits");
  p.router_logits = a.router_logits.data;
  p.experts = static_cast<int32_t*>(a.experts.data);
  p.shares = static_cast<float*>(a.shares.data);
  p.places = static_cast<int32_t*>(a.places.data);
  p.counts = static_cast<int32_t*>(a.counts.data);
  p.num_rows = static_cast<int32_t>(rows);
  p.num_experts = static_cast<int32_t>(experts);
  p.top_k = static_cast<int32_t>(top_k);
  p.dtype = floating_type(a.router_logits);
  p.renormalise = a.renormalise != 0;
  return p;
}

GatherRowsParams gather_rows_params(const te3_gather_rows_args& a, Check* check) {
  GatherRowsParams p = {};
  check->floating("x", a.x);
  check->tensor("x", a.x, a.x.dtype, {kAny, kAny}, "[n, H]");
  check->tensor("counts", a.counts, TE3_INT32, {kAny, kAny}, "[ceil(n / 64), E]");
  check->tensor("experts", a.experts, TE3_INT32, {kAny, kAny}, "[n, k]");
  if (!check->ok()) return p;
  const int64_t rows = a.x.shape[0], hidden = a.x.shape[1], experts = a.counts.shape[1], top_k = a.experts.shape[1];
  check_top_k(experts, top_k, check);
  check_multiple("H", hidden, 8, check);
  check->tensor("experts", a.experts, TE3_INT32, {rows, top_k}, "[n, k]");
  check->tensor("places", a.places, TE3_INT32, {rows, top_k}, "[n, k]");
  check->tensor("counts", a.counts, TE3_INT32, {(rows + kChunk - 1) / kChunk, experts}, "[ceil(n / 64), E]");
  check->tensor("gathered", a.gathered, a.x.dtype, {rows * top_k, hidden}, "[n * k, H]");
  check->tensor("positions", a.positions, TE3_INT32, {rows, top_k}, "[n, k]");
  check->tensor("ends", a.ends, TE3_INT32, {experts}, "[E]");
  check->that(a.gathered.data != a.x.data, "gathered: must not be x's memory");
  p.x = a.x.data;
  p.experts = static_cast<const int32_t*>(a.experts.data);
  p.places = static_cast<const int32_t*>(a.places.data);
  p.counts = static_cast<const int32_t*>(a.counts.data);
  p.gathered = a.gathered.data;
  p.positions = static_cast<int32_t*>(a.positions.data);
  p.ends = static_cast<int32_t*>(a.ends.data);
  p.num_rows = static_cast<int32_t>(rows);
  p.num_experts = static_cast<int32_t>(experts);
  p.hidden = static_cast<int32_t>(hidden);
  p.top_k = static_cast<int32_t>(top_k);
  p.dtype = floating_type(a.x);
  return p;
}

CombineRowsParams combine_rows_params(const te3_combine_rows_args& a, Check* check) {
  CombineRowsParams p = {};
  check->floating("y", a.y);
  check->tensor("y", a.y, a.y.dtype, {kAny, kAny}, "[n, H]");
  check->tensor("positions", a.positions, TE3_INT32, {kAny, kAny}, "[n, k]");
  if (!check->ok()) return p;
  const int64_t rows = a.y.shape[0], hidden = a.y.shape[1], top_k = a.positions.shape[1];
  check_multiple("H", hidden, 8, check);
  check->tensor("positions", a.positions, TE3_INT32, {rows, top_k}, "[n, k]");
  check->tensor("shares", a.shares, TE3_FLOAT32, {rows, top_k}, "[n, k]");
  check->tensor("parts", a.parts, a.y.dtype, {rows * top_k, hidden}, "[n * k, H]");
  p.parts = a.parts.data;
  p.positions = static_cast<const int32_t*>(a.positions.data);
  p.shares = static_cast<const float*>(a.shares.data);
  p.y = a.y.data;
  p.num_rows = static_cast<int32_t>(rows);
  p.hidden = static_cast<int32_t>(hidden);
  p.top_k = static_cast<int32_t>(top_k);
  p.dtype = floating_type(a.y);
  return p;
}

}  // namespace trt_eagle3
