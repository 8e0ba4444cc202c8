// What the other plugins compute, launched by a loaded copy as a runtime does, against float64 on the host.
#include <algorithm>
#include <cmath>

#include "launch.h"

namespace cases {
namespace {

void rms_norm(double* row, const Host& weight, int64_t width, double epsilon) {
  double squares = 0.0;
  for (int64_t i = 0; i < width; ++i) squares += row[i] * row[i];
  const double inverse = 1.0 / std::sqrt(squares / width + epsilon);
  for (int64_t i = 0; i < width; ++i) row[i] *= inverse * weight[i];
}

void check_add_rms_norm(DataType t, DataType x, const DataType* residual, int64_t hidden, double scale) {
  const int64_t rows = 5;
  const Sound s = add_rms_norm(t, x, residual, rows, hidden);
  std::vector<Host> in = {normal(s.in[0]), normal(s.in[1])};
  if (residual != nullptr) in.push_back(normal(s.in[2], scale));
  Host sum = in[0];
  for (size_t i = 0; residual != nullptr && i < sum.values.size(); ++i) sum[i] = rounded(sum[i] + in[2][i], *residual);
  Host y = sum;
  for (int64_t row = 0; row < rows; ++row) rms_norm(&y[row * hidden], in[1], hidden, 1e-6);
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatTolerance;
  const std::string what = "AddRmsNorm T=" + std::to_string(int(t)) + " x=" + std::to_string(int(x)) +
                           " residual=" + (residual == nullptr ? "none" : std::to_string(int(*residual))) +
                           " H=" + std::to_string(hidden);
  const auto got = launch(s, in);
  compare(what, got, 0, y, tolerance);
  compare(what, launch(s, in, {true, false, true}), 0, y, tolerance);
  if (residual != nullptr) compare(what, got, 1, sum, 0.0);
  in[1][3] += 8.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], y) > tolerance, what + ": a planted weight is noticed");
}

void check_rope(DataType t, bool norm, int32_t dim) {
  const int64_t batch = 2, seq = 7, n = batch * seq, heads = 4, heads_kv = 2, half = dim / 2;
  const Sound s = qk_norm_mrope(t, norm, batch, seq, heads, heads_kv, dim);
  std::vector<Host> in = {normal(s.in[0]), integers(s.in[1], 0, 262143), {}, integers(s.in[3], 0, 2)};
  for (int64_t i = 0; i < half; ++i) in[2].values.push_back(rounded(std::pow(5e6, -2.0 * i / dim), DataType::kFLOAT));
  for (size_t i = 4; i < s.in.size(); ++i) in.push_back(normal(s.in[i]));
  Host outs[3];
  for (int64_t token = 0; token < n; ++token) {
    for (int64_t head = 0; head < heads + 2 * heads_kv; ++head) {
      const int part = head < heads ? 0 : head < heads + heads_kv ? 1 : 2;
      std::vector<double> row(dim);
      for (int64_t i = 0; i < dim; ++i) row[i] = in[0][(token * (heads + 2 * heads_kv) + head) * dim + i];
      if (norm && part < 2) rms_norm(row.data(), in[4 + part], dim, 1e-6);
      for (int64_t i = 0; part < 2 && i < half; ++i) {
        const auto position = static_cast<float>(in[1][static_cast<int64_t>(in[3][i]) * n + token]);
        const double angle = position * static_cast<float>(in[2][i]);
        const double low = row[i], high = row[i + half];
        row[i] = low * std::cos(angle) - high * std::sin(angle);
        row[i + half] = high * std::cos(angle) + low * std::sin(angle);
      }
      outs[part].values.insert(outs[part].values.end(), row.begin(), row.end());
    }
  }
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatTolerance;
  const std::string what =
      "QKNormMRope T=" + std::to_string(int(t)) + (norm ? " with norms" : "") + " D=" + std::to_string(dim);
  for (const bool captured : {false, true}) {
    const auto got = launch(s, in, {true, false, captured});
    for (size_t i = 0; i < 3; ++i) compare(what, got, i, outs[i], i == 2 ? 0.0 : tolerance);
  }
  in[3][0] = in[3][0] == 0.0 ? 1.0 : 0.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], outs[0]) > tolerance, what + ": a planted axis is noticed");
  in[3][0] = -1000000000.0;
  in[3][1] = 1000000000.0;
  check(!launch(s, in).empty(), what + ": axes of any content do no harm");
}

void check_pick_rows(DataType t, int64_t hidden) {
  const int64_t batch = 3, num_new = 7, num_rows = 4;
  const Sound s = pick_rows(t, batch, num_new, num_rows, hidden);
  std::vector<Host> in = {normal(s.in[0]), integers(s.in[1], 0, num_new - 1)};
  Host y;
  for (int64_t i = 0; i < batch * num_rows; ++i) {
    const double* row = &in[0][(i / num_rows * num_new + static_cast<int64_t>(in[1][i])) * hidden];
    y.values.insert(y.values.end(), row, row + hidden);
  }
  const std::string what = "PickRows T=" + std::to_string(int(t)) + " H=" + std::to_string(hidden);
  compare(what, launch(s, in), 0, y, 0.0);
  compare(what, launch(s, in, {true, false, true}), 0, y, 0.0);
  in[1][0] = in[1][0] == 0.0 ? 1.0 : 0.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], y) > 0.0, what + ": a planted row is noticed");
  in[1] = integers(s.in[1], -2000000000, 2000000000);
  check(!launch(s, in).empty(), what + ": rows of any content do no harm");
}

Host product(const Host& x, const Host& weight, int64_t rows, int64_t inner, int64_t outer) {
  Host y;
  for (int64_t i = 0; i < rows * outer; ++i) {
    double sum = 0.0;
    for (int64_t k = 0; k < inner; ++k) sum += x[i / outer * inner + k] * weight[i % outer * inner + k];
    y.values.push_back(sum);
  }
  return y;
}

void check_linear(DataType t, int64_t rows, int64_t inner, int64_t outer) {
  const Sound s = linear(t, rows, inner, outer);
  std::vector<Host> in = {normal(s.in[0]), normal(s.in[1])};
  const Host y = product(in[0], in[1], rows, inner, outer);
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatProductTolerance;
  const std::string what = "Linear T=" + std::to_string(int(t)) + " rows=" + std::to_string(rows) +
                           " K=" + std::to_string(inner) + " N=" + std::to_string(outer);
  compare(what, launch(s, in), 0, y, tolerance);
  compare(what + " while building", launch(s, in, {true, true, false}), 0, y, tolerance);
  compare(what + " captured", launch(s, in, {true, false, true}), 0, y, tolerance);
  in[1][(outer - 1) * inner + 3] += 64.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], y) > tolerance, what + ": a planted weight is noticed");
}

// Whether cuBLAS is found: all but a few rows of float16 goes through it. Says so where it is not.
bool has_cublas() {
  const Sound s = linear(DataType::kFLOAT, 1, 32, 16);
  auto plugin = driver::create(s.op, s.fields);
  plugin->output_shapes(s.in);
  plugin->configure(s.in, s.out);
  plugin->change_shapes(s.in, s.out);
  Device x(1 << 10, 0), weight(1 << 12, 0), y(1 << 10, 0), workspace(plugin->workspace_bytes(s.in, s.out));
  const bool ran = plugin->enqueue(s.in, s.out, {x.get(), weight.get()}, {y.get()}, workspace.get(), nullptr) == 0;
  cudaDeviceSynchronize();
  const std::string log = stand_in::take_log();
  if (ran) return true;
  const bool absent = log.find("no libcublas") != std::string::npos;
  check(absent, "Linear: cuBLAS works where it is found: " + log);
  std::printf("Linear: more than 16 rows and float32 are not tested: %s", log.c_str());
  return false;
}

void check_silu_mul(DataType t, int64_t rows, int64_t width) {
  const Sound s = silu_mul(t, rows, width);
  std::vector<Host> in = {normal(s.in[0], 3.0)};
  const auto wanted = [&] {
    Host out;
    for (int64_t i = 0; i < rows * width; ++i) {
      const double* row = &in[0][i / width * 2 * width];
      out.values.push_back(row[i % width] / (1.0 + std::exp(-row[i % width])) * row[width + i % width]);
    }
    return out;
  };
  const Host out = wanted();
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatTolerance;
  const std::string what =
      "SiluMul T=" + std::to_string(int(t)) + " rows=" + std::to_string(rows) + " W=" + std::to_string(width);
  compare(what, launch(s, in), 0, out, tolerance);
  compare(what, launch(s, in, {true, false, true}), 0, out, tolerance);
  for (int64_t row = 0; row < rows; ++row) {
    const auto gate = in[0].values.begin() + row * 2 * width;
    std::swap_ranges(gate, gate + width, gate + width);
  }
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], out) > tolerance, what + ": gate and up exchanged are noticed");
}

}  // namespace

bool run_gpu_cases() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    cudaGetLastError();
    std::printf("no CUDA device: launches are not tested\n");
    return false;
  }
  const DataType half = DataType::kHALF, real = DataType::kFLOAT;
  for (const int64_t hidden : {64, 111, 2048, 9000}) {
    for (const DataType t : {half, real}) {
      check_add_rms_norm(t, t, nullptr, hidden, 1.0);
      check_add_rms_norm(t, t, &t, hidden, 1.0);
    }
    check_add_rms_norm(half, real, nullptr, hidden, 1.0);
    check_add_rms_norm(half, half, &real, hidden, 3e5);  // a stream that float16 cannot hold
    check_add_rms_norm(half, real, &real, hidden, 3e5);
  }
  const bool with_cublas = has_cublas();
  for (const int64_t rows : {1, 16, 17, 40}) {
    for (const DataType t : {half, real}) {
      for (const int64_t width : {64, 111, 2048}) check_silu_mul(t, rows, width);
      if ((rows > 16 || t == real) && !with_cublas) continue;
      check_linear(t, rows, 64, 96);
      check_linear(t, rows, 2048, 1000);
      if (with_cublas) check_linear(t, rows, 40, 24);  // a K that our kernel leaves to cuBLAS
    }
  }
  if (with_cublas) check_linear(half, 16, 12288, 200);  // x does not fit beside: by wgmma on Hopper, else by cuBLAS
  for (const DataType t : {half, real}) {
    for (const int64_t hidden : {64, 111, 2048}) check_pick_rows(t, hidden);
    for (const bool norm : {false, true}) {
      for (const int32_t dim : {64, 128}) check_rope(t, norm, dim);
    }
  }
  run_delta_cases();
  run_moe_cases();
  run_packed_cases(with_cublas);
  run_tree_cases();
  run_vision_cases();
  return true;
}

}  // namespace cases
