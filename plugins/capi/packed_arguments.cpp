// Arguments of the kernels for quantised weights.
#include <climits>

#include "arguments.h"

namespace trt_eagle3 {
namespace {

static_assert(TE3_FLOAT8_E4M3FN == 5 && TE3_UINT8 == 6 && TE3_INT8 == 7);

constexpr int64_t kColumns = 128, kRows = 16;  // of K and N: a multiple

bool fits_int(int64_t x) { return x >= 0 && x <= INT_MAX; }
bool aligned(const te3_tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

// Of `t`, which is not float32's business here either: a kernel says so.
DType floating_type(const te3_tensor& t) { return static_cast<DType>(t.dtype); }

void check_columns(const char* name, int64_t columns, Check* check) {
  check->that(columns > 0 && columns % kColumns == 0, [&] {
    return std::string(name) + ": K must be a positive multiple of " + std::to_string(kColumns) + ", got " +
           std::to_string(columns);
  });
}

void check_rows(int64_t rows, Check* check) {
  check->that(rows % kRows == 0, [&] {
    return "weight: N must be a multiple of " + std::to_string(kRows) + ", got " + std::to_string(rows);
  });
}

template <typename Params>
void set_byte_weight(int32_t dtype, const te3_tensor& weight, const te3_tensor& scale, Params* p, Check* check) {
  check->tensor("weight", weight, dtype, {kAny, kAny}, "[N, K]");
  check->that(aligned(weight), "weight: data must be aligned to 16 bytes");
  check->tensor("scale", scale, TE3_FLOAT32, {kAny, kAny}, "[rows, columns]");
  if (!check->ok()) return;
  const int64_t outer = weight.shape[0], inner = weight.shape[1], rows = scale.shape[0], columns = scale.shape[1];
  check_columns("weight", inner, check);
  check_rows(outer, check);
  check->that(fits_int(outer) && fits_int(inner), "weight: N and K must be 32-bit numbers");
  check->that((rows == outer || rows == (outer + 127) / 128 || rows == 1) && (columns == 1 || columns == inner / 128),
              [&] {
                return "scale: expected N, ceil(N / 128) or 1 rows and 1 or K / 128 columns for weight " +
                       Check::text(weight) + ", got " + Check::text(scale);
              });
  p->weight = static_cast<decltype(p->weight)>(weight.data);
  p->scale = static_cast<const float*>(scale.data);
  p->inner = static_cast<int32_t>(inner);
  p->outer = static_cast<int32_t>(outer);
  p->scale_rows = static_cast<int32_t>(rows);
  p->scale_columns = static_cast<int32_t>(columns);
}

template <typename Params>
void set_int4_weight(const te3_tensor& weight, const te3_tensor& scale, const te3_tensor& zero_point, Params* p,
                     Check* check) {
  check->tensor("weight", weight, TE3_INT32, {kAny, kAny}, "[N, K / 8]");
  check->that(aligned(weight), "weight: data must be aligned to 16 bytes");
  check->that(scale.dtype == TE3_FLOAT16 || scale.dtype == TE3_BFLOAT16, "scale: expected float16 or bfloat16");
  if (!check->ok()) return;
  const int64_t outer = weight.shape[0], inner = weight.shape[1] * 8, groups = scale.shape[1];
  check_columns("weight", inner, check);
  check_rows(outer, check);
  check->tensor("scale", scale, scale.dtype, {outer, kAny}, "[N, K / group]");
  check->that(fits_int(outer) && fits_int(inner), "weight: N and K must be 32-bit numbers");
  const int64_t group = groups > 0 ? inner / groups : 0;
  check->that((group == 32 || group == 64 || group == 128) && group * groups == inner, [&] {
    return "scale: expected one for each 32, 64 or 128 columns of K = " + std::to_string(inner) + ", got " +
           Check::text(scale);
  });
  if (zero_point.data != nullptr) {
    check->tensor("zero_point", zero_point, TE3_UINT8, {outer, groups}, "[N, K / group]");
  }
  p->weight = static_cast<const int32_t*>(weight.data);
  p->scale = scale.data;
  p->zero_point = zero_point.data;
  p->inner = static_cast<int32_t>(inner);
  p->outer = static_cast<int32_t>(outer);
  p->group = static_cast<int32_t>(group);
  p->scale_dtype = floating_type(scale);
}

template <typename Params>
void set_fp4_weight(const te3_tensor& weight, const te3_tensor& scale, const te3_tensor& row_scale, Params* p,
                    Check* check) {
  check->tensor("weight", weight, TE3_INT32, {kAny, kAny}, "[N, K / 8]");
  check->that(aligned(weight), "weight: data must be aligned to 16 bytes");
  if (!check->ok()) return;
  const int64_t outer = weight.shape[0], inner = weight.shape[1] * 8;
  check_columns("weight", inner, check);
  check_rows(outer, check);
  check->that(fits_int(outer) && fits_int(inner), "weight: N and K must be 32-bit numbers");
  check->tensor("scale", scale, TE3_FLOAT8_E4M3FN, {outer, inner / 16}, "[N, K / 16]");
  check->tensor("row_scale", row_scale, TE3_FLOAT32, {outer, 1}, "[N, 1]");
  p->weight = static_cast<const int32_t*>(weight.data);
  p->scale = static_cast<decltype(p->scale)>(scale.data);
  p->row_scale = static_cast<const float*>(row_scale.data);
  p->inner = static_cast<int32_t>(inner);
  p->outer = static_cast<int32_t>(outer);
}

// Rows [M, times K] that are made codes.
void check_source(const char* name, const te3_tensor& x, int times, Check* check) {
  check->floating(name, x);
  check->tensor(name, x, x.dtype, {kAny, kAny}, times == 1 ? "[M, K]" : "[M, 2 * K]");
  check->that(aligned(x), "rows: data must be aligned to 16 bytes");
  if (!check->ok()) return;
  check->that(x.shape[1] % times == 0, "gate_up: columns must be even");
  check_columns(name, x.shape[1] / times, check);
  check->that(fits_int(x.shape[0]) && fits_int(x.shape[1]), "rows: M and K must be 32-bit numbers");
}

// Codes [M, inner] and scales of the rows of x.
template <typename Params>
void set_codes(const te3_tensor& x, int64_t inner, const te3_tensor& q, const te3_tensor& scale, Params* p,
               Check* check) {
  const int64_t rows = x.shape[0];
  const bool rounds = q.dtype == x.dtype, integers = q.dtype == TE3_INT8;
  check->tensor("q", q, rounds || integers ? q.dtype : TE3_FLOAT8_E4M3FN, {rows, inner}, "[M, K]");
  check->that(aligned(q), "q: data must be aligned to 16 bytes");
  check->tensor("scale", scale, TE3_FLOAT32, {kAny, rows}, "[1 or K / 128, M]");
  if (!check->ok()) return;
  const int64_t groups = scale.shape[0];
  check->that(integers ? groups == 2 : groups == 1 || groups == inner / kColumns, [&] {
    return std::string("scale: expected ") + (integers ? "2" : "1 or K / 128") + " rows for q " + Check::text(q) +
           ", got " + Check::text(scale);
  });
  p->q = q.data;
  p->scale = static_cast<float*>(scale.data);
  p->num_rows = static_cast<int32_t>(rows);
  p->inner = static_cast<int32_t>(inner);
  p->groups = integers ? 1 : static_cast<int32_t>(groups);
  p->rounds = rounds;
  p->integers = integers;
  p->dtype = floating_type(x);
}

// x [M, K] and y [M, N] of a product.
template <typename Params>
void set_product(const te3_tensor& x, const te3_tensor& y, int32_t prefetch_safe, Params* p, Check* check) {
  check->floating("x", x);
  check->tensor("x", x, x.dtype, {kAny, p->inner}, "[M, K]");
  check->tensor("y", y, x.dtype, {x.shape[0], p->outer}, "[M, N]");
  check->that(fits_int(x.shape[0]), "x: M must be a 32-bit number");
  check->that(y.data != x.data, "y: must not be x's memory");
  p->x = x.data;
  p->y = y.data;
  p->num_rows = static_cast<int32_t>(x.shape[0]);
  p->dtype = floating_type(x);
  p->prefetch_safe = prefetch_safe;
}

template <typename Params>
void set_unpacked(const te3_tensor& out, Params* p, Check* check) {
  check->floating("out", out);
  check->tensor("out", out, out.dtype, {p->outer, p->inner}, "[N, K]");
  p->out = out.data;
  p->dtype = floating_type(out);
}

}  // namespace

LinearFp8Params linear_fp8_params(const te3_linear_fp8_args& a, Check* check) {
  LinearFp8Params p = {};
  set_byte_weight(TE3_FLOAT8_E4M3FN, a.weight, a.scale, &p, check);
  if (check->ok()) set_product(a.x, a.y, a.prefetch_safe, &p, check);
  return p;
}

LinearInt8Params linear_int8_params(const te3_linear_int8_args& a, Check* check) {
  LinearInt8Params p = {};
  set_byte_weight(TE3_UINT8, a.weight, a.scale, &p, check);
  if (check->ok()) set_product(a.x, a.y, a.prefetch_safe, &p, check);
  return p;
}

LinearInt4Params linear_int4_params(const te3_linear_int4_args& a, Check* check) {
  LinearInt4Params p = {};
  set_int4_weight(a.weight, a.scale, a.zero_point, &p, check);
  if (check->ok()) set_product(a.x, a.y, a.prefetch_safe, &p, check);
  return p;
}

LinearW8A8Params linear_w8a8_params(const te3_linear_w8a8_args& a, Check* check) {
  LinearW8A8Params p = {};
  const bool integers = a.x.dtype == TE3_INT8;
  LinearFp8Params weight = {};
  set_byte_weight(integers ? TE3_UINT8 : TE3_FLOAT8_E4M3FN, a.weight, a.scale, &weight, check);
  if (!check->ok()) return p;
  const int64_t inner = weight.inner, outer = weight.outer;
  check->that(weight.scale_columns == 1 && (weight.scale_rows == outer || weight.scale_rows == 1), [&] {
    return "scale: expected N or 1 rows and 1 column for weight " + Check::text(a.weight) + ", got " +
           Check::text(a.scale);
  });
  check->tensor("x", a.x, integers ? TE3_INT8 : TE3_FLOAT8_E4M3FN, {kAny, inner}, "[M, K]");
  check->that(aligned(a.x), "x: data must be aligned to 16 bytes");
  check->floating("y", a.y);
  check->tensor("y", a.y, a.y.dtype, {a.x.shape[0], outer}, "[M, N]");
  check->tensor("x_scale", a.x_scale, TE3_FLOAT32, {integers ? 2 : 1, a.x.shape[0]}, integers ? "[2, M]" : "[1, M]");
  check->that(fits_int(a.x.shape[0]), "x: M must be a 32-bit number");
  p.x = a.x.data;
  p.x_scale = static_cast<const float*>(a.x_scale.data);
  p.weight = a.weight.data;
  p.scale = weight.scale;
  p.y = a.y.data;
  p.num_rows = static_cast<int32_t>(a.x.shape[0]);
  p.inner = weight.inner;
  p.outer = weight.outer;
  p.scale_rows = weight.scale_rows;
  p.integers = integers;
  p.dtype = floating_type(a.y);
  p.prefetch_safe = a.prefetch_safe;
  return p;
}

UnpackFp8Params unpack_fp8_params(const te3_unpack_fp8_args& a, Check* check) {
  UnpackFp8Params p = {};
  set_byte_weight(TE3_FLOAT8_E4M3FN, a.weight, a.scale, &p, check);
  if (check->ok()) set_unpacked(a.out, &p, check);
  return p;
}

UnpackInt8Params unpack_int8_params(const te3_unpack_int8_args& a, Check* check) {
  UnpackInt8Params p = {};
  set_byte_weight(TE3_UINT8, a.weight, a.scale, &p, check);
  if (check->ok()) set_unpacked(a.out, &p, check);
  return p;
}

UnpackInt4Params unpack_int4_params(const te3_unpack_int4_args& a, Check* check) {
  UnpackInt4Params p = {};
  set_int4_weight(a.weight, a.scale, a.zero_point, &p, check);
  if (check->ok()) set_unpacked(a.out, &p, check);
  return p;
}

LinearNvfp4Params linear_nvfp4_params(const te3_linear_nvfp4_args& a, Check* check) {
  LinearNvfp4Params p = {};
  set_fp4_weight(a.weight, a.scale, a.row_scale, &p, check);
  if (check->ok()) set_product(a.x, a.y, a.prefetch_safe, &p, check);
  return p;
}

UnpackNvfp4Params unpack_nvfp4_params(const te3_unpack_nvfp4_args& a, Check* check) {
  UnpackNvfp4Params p = {};
  set_fp4_weight(a.weight, a.scale, a.row_scale, &p, check);
  if (check->ok()) set_unpacked(a.out, &p, check);
  return p;
}

QuantiseRowsParams quantise_rows_params(const te3_quantise_rows_args& a, Check* check) {
  QuantiseRowsParams p = {};
  check_source("x", a.x, 1, check);
  if (check->ok()) set_codes(a.x, a.x.shape[1], a.q, a.scale, &p, check);
  check->that(p.rounds == 0 || a.q.data != a.x.data, "q: must not be x's memory");
  p.x = a.x.data;
  return p;
}

QuantiseSiluMulParams quantise_silu_mul_params(const te3_quantise_silu_mul_args& a, Check* check) {
  QuantiseSiluMulParams p = {};
  check_source("gate_up", a.gate_up, 2, check);
  if (check->ok()) set_codes(a.gate_up, a.gate_up.shape[1] / 2, a.q, a.scale, &p, check);
  check->that(p.rounds == 0 || a.q.data != a.gate_up.data, "q: must not be gate_up's memory");
  p.gate_up = a.gate_up.data;
  return p;
}

QuantiseAddRmsNormParams quantise_add_rms_norm_params(const te3_quantise_add_rms_norm_args& a, Check* check) {
  QuantiseAddRmsNormParams p = {};
  const bool adds = a.residual.data != nullptr;
  check_source("x", a.x, 1, check);
  if (!check->ok()) return p;
  const int64_t rows = a.x.shape[0], inner = a.x.shape[1];
  check->tensor("weight", a.weight, a.x.dtype, {inner}, "[K]");
  check->that(adds == (a.sum.data != nullptr), "residual and sum: give both or neither");
  if (adds) {
    check->tensor("residual", a.residual, a.x.dtype, {rows, inner}, "[M, K]");
    check->tensor("sum", a.sum, a.x.dtype, {rows, inner}, "[M, K]");
  }
  check->that(aligned(a.residual) && aligned(a.weight) && aligned(a.sum),
              "residual, weight, sum: data must be aligned to 16 bytes");
  set_codes(a.x, inner, a.q, a.scale, &p, check);
  check->that(p.rounds == 0 || a.q.data != a.x.data, "q: must not be x's memory");
  p.x = a.x.data;
  p.residual = a.residual.data;
  p.weight = a.weight.data;
  p.sum = a.sum.data;
  p.epsilon = a.epsilon;
  return p;
}

}  // namespace trt_eagle3
