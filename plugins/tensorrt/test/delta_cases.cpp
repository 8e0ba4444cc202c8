// GatedDelta against a float64 recurrence that follows every row's own path.
#include <cmath>

#include "launch.h"

namespace cases {
namespace {

// Roundings of the convolution, of o, of its norm and of the output.
constexpr double kTolerance = 6 * kHalfTolerance, kRealTolerance = 4 * kFloatProductTolerance;

struct Rule {
  Sound sound;
  DeltaSizes z;
  std::vector<Host> in;
  std::vector<std::vector<int>> parents;
  Host out, windows, matrices;

  int64_t keys() const { return int64_t{z.key_heads} * z.key_dim; }
  int64_t values() const { return int64_t{z.value_heads} * z.value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
};

double silu(double x) { return x / (1.0 + std::exp(-x)); }

// The state after a row: its window, then its matrices.
struct After {
  std::vector<double> window, matrices;
};

// One more row of `sequence`; returns o, normed and gated.
std::vector<double> follow(const Rule& r, int64_t n, DataType t, After* state) {
  const DeltaSizes& z = r.z;
  const int64_t channels = r.channels(), keys = r.keys(), values = r.values(), taps = z.taps;
  const double* row = &r.in[0].values[n * (channels + values)];
  std::vector<double> mixed(channels), out(values);
  for (int64_t c = 0; c < channels; ++c) {
    double sum = row[c] * r.in[2][c * taps + taps - 1];
    for (int64_t w = 0; w + 1 < taps; ++w) sum += state->window[w * channels + c] * r.in[2][c * taps + w];
    mixed[c] = rounded(silu(rounded(sum, t)), t);
  }
  state->window.erase(state->window.begin(), state->window.begin() + channels);
  state->window.insert(state->window.end(), row, row + channels);
  for (int32_t h = 0; h < z.value_heads; ++h) {
    const int64_t first = h / (z.value_heads / z.key_heads) * z.key_dim;
    const double *q = &mixed[first], *k = &mixed[keys + first], *v = &mixed[2 * keys + int64_t{h} * z.value_dim];
    double* matrix = &state->matrices[int64_t{h} * z.key_dim * z.value_dim];
    double of_q = 1e-6, of_k = 1e-6, squares = 0.0;
    for (int64_t d = 0; d < z.key_dim; ++d) {
      of_q += q[d] * q[d];
      of_k += k[d] * k[d];
    }
    const double* ba = &r.in[1].values[n * 2 * z.value_heads];
    const double beta = rounded(1.0 / (1.0 + std::exp(-ba[h])), t);
    const double decay =
        std::exp(-std::exp(r.in[3][h]) * std::log1p(std::exp(ba[z.value_heads + h] + r.in[4][h])));
    for (int64_t e = 0; e < z.value_dim; ++e) {
      double said = 0.0, o = 0.0;
      for (int64_t d = 0; d < z.key_dim; ++d) {
        matrix[d * z.value_dim + e] *= decay;
        said += matrix[d * z.value_dim + e] * k[d] / std::sqrt(of_k);
      }
      for (int64_t d = 0; d < z.key_dim; ++d) {
        matrix[d * z.value_dim + e] += beta * (v[e] - said) * k[d] / std::sqrt(of_k);
        o += matrix[d * z.value_dim + e] * q[d] / std::sqrt(of_q * static_cast<double>(z.key_dim));
      }
      out[int64_t{h} * z.value_dim + e] = rounded(o, t);
    }
    for (int64_t e = 0; e < z.value_dim; ++e) squares += std::pow(out[int64_t{h} * z.value_dim + e], 2);
    for (int64_t e = 0; e < z.value_dim; ++e) {
      double& o = out[int64_t{h} * z.value_dim + e];
      const double unit = rounded(o / std::sqrt(squares / static_cast<double>(z.value_dim) + 1e-6), t);
      o = rounded(unit * r.in[5][e], t) * silu(row[channels + int64_t{h} * z.value_dim + e]);
    }
  }
  return out;
}

Rule make_rule(DataType t, const DeltaSizes& z, DataType mask, const std::vector<int>& parents, int certain) {
  Rule r{gated_delta(t, z, mask), z, {}, {}, {}, {}, {}};
  for (const Tensor& tensor : r.sound.in) r.in.push_back(normal(tensor, 0.5));
  const int64_t window = (z.taps - 1) * r.channels(), size = r.values() * z.key_dim;
  for (int64_t b = 0; b < z.batch; ++b) {
    r.in[8][b] = static_cast<double>(b + 1);
    r.in[9][b] = static_cast<double>(z.entries - 1 - b);
    r.in[10][b] = certain;
    std::vector<std::vector<double>> sees;
    for (int64_t i = 0; i < z.num_new; ++i) {
      sees.push_back(parents[i] < 0 ? std::vector<double>(z.num_new) : sees[parents[i]]);
      sees.back()[i] = 1.0;
      std::copy(sees.back().begin(), sees.back().end(), &r.in[11].values[(b * z.num_new + i) * z.num_new]);
    }
  }
  r.windows = r.in[6];
  r.matrices = r.in[7];
  for (int64_t b = 0; b < z.batch; ++b) {
    const auto read = static_cast<int64_t>(r.in[8][b]), write = static_cast<int64_t>(r.in[9][b]);
    const After before{{&r.in[6].values[read * window], &r.in[6].values[read * window] + window},
                       {&r.in[7].values[read * size], &r.in[7].values[read * size] + size}};
    std::vector<After> after;
    for (int64_t i = 0; i < z.num_new; ++i) {
      After state = parents[i] < 0 ? before : after[parents[i]];
      const std::vector<double> out = follow(r, b * z.num_new + i, t, &state);
      r.out.values.insert(r.out.values.end(), out.begin(), out.end());
      after.push_back(std::move(state));
    }
    const After& stays = certain > 0 ? after[certain - 1] : before;
    std::copy(stays.window.begin(), stays.window.end(), &r.windows.values[write * window]);
    std::copy(stays.matrices.begin(), stays.matrices.end(), &r.matrices.values[write * size]);
  }
  return r;
}

void compare_all(const std::string& what, const std::vector<Host>& got, const Rule& r, double tolerance) {
  compare(what, got, 0, r.out, tolerance);
  compare(what + ", windows", got, 1, r.windows, tolerance);
  compare(what + ", matrices", got, 2, r.matrices, tolerance);
}

void check_rule(DataType t, const DeltaSizes& z, DataType mask, const std::vector<int>& parents, int certain) {
  const double tolerance = t == DataType::kHALF ? kTolerance : kRealTolerance;
  Rule r = make_rule(t, z, mask, parents, certain);
  const std::string what = "GatedDelta S=" + std::to_string(z.num_new);
  compare_all(what, launch(r.sound, r.in), r, tolerance);
  compare_all(what + " two memories", launch(r.sound, r.in, {false, false, false}), r, tolerance);
  r.in[10][0] += certain > 1 ? -1.0 : 1.0;
  const auto planted = launch(r.sound, r.in);
  if (z.num_new > 1) {
    check(!planted.empty() && distance(planted[2], r.matrices) > tolerance, what + ": another row is noticed");
  }
  check(!launch(r.sound, r.in, {true, true, false}).empty(), what + " while building");
}

}  // namespace

void run_delta_cases() {
  const DeltaSizes sizes = {2, 6, 7, 2, 4, 128, 128, 4};
  for (const DataType t : {DataType::kHALF, DataType::kFLOAT}) {
    for (const DataType mask : {DataType::kBOOL, DataType::kINT32}) {
      check_rule(t, sizes, mask, {-1, 0, 0, 1, 2, 1}, 1);
    }
    std::vector<int> chain(70);
    for (int i = 0; i < 70; ++i) chain[i] = i - 1;
    check_rule(t, {1, 70, 4, 1, 2, 64, 36, 3}, DataType::kBOOL, chain, 50);
  }
}

}  // namespace cases
