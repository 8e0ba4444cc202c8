// FusedMoe against float64.
#include <cmath>
#include <numeric>

#include "launch.h"

namespace cases {
namespace {

// Two products, the inner values rounded to 11 bits in between.
constexpr double kTolerance = 2 * kHalfTolerance;

struct Mixture {
  Sound sound;
  std::vector<Host> in;
  Host y;
};

Mixture make_mixture(int64_t rows, int64_t experts, int32_t top_k, int64_t hidden, int64_t width, bool renormalise) {
  Mixture m{fused_moe(DataType::kHALF, rows, experts, top_k, hidden, width, renormalise), {}, {}};
  const double scale = 1.0 / std::sqrt(static_cast<double>(hidden));
  m.in = {normal(m.sound.in[0]), normal(m.sound.in[1]), normal(m.sound.in[2], scale), normal(m.sound.in[3], scale)};
  for (int64_t row = 0; row < rows; ++row) {
    const double *x = &m.in[0][row * hidden], *logits = &m.in[1][row * experts];
    std::vector<int64_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    double all = 0.0, chosen = 0.0;
    for (int64_t e = 0; e < experts; ++e) all += std::exp(logits[e]);
    for (int32_t k = 0; k < top_k; ++k) chosen += std::exp(logits[order[k]]);
    std::vector<double> sum(hidden, 0.0);
    for (int32_t k = 0; k < top_k; ++k) {
      const double share = std::exp(logits[order[k]]) / (renormalise ? chosen : all);
      const double* gate_up = &m.in[2][order[k] * 2 * width * hidden];
      const double* down = &m.in[3][order[k] * hidden * width];
      std::vector<double> inner(width);
      for (int64_t i = 0; i < width; ++i) {
        double gate = 0.0, up = 0.0;
        for (int64_t h = 0; h < hidden; ++h) {
          gate += x[h] * gate_up[i * hidden + h];
          up += x[h] * gate_up[(width + i) * hidden + h];
        }
        inner[i] = gate / (1.0 + std::exp(-gate)) * up;
      }
      for (int64_t h = 0; h < hidden; ++h) {
        for (int64_t i = 0; i < width; ++i) sum[h] += share * down[h * width + i] * inner[i];
      }
    }
    m.y.values.insert(m.y.values.end(), sum.begin(), sum.end());
  }
  return m;
}

void check_mixture(Mixture m) {
  const std::string what = "FusedMoe rows=" + std::to_string(m.sound.in[0].sizes[0]);
  compare(what, launch(m.sound, m.in), 0, m.y, kTolerance);
  compare(what + " while building", launch(m.sound, m.in, {true, true, false}), 0, m.y, kTolerance);
  compare(what + " captured", launch(m.sound, m.in, {true, false, true}), 0, m.y, kTolerance);
  std::swap(m.in[1][0], m.in[1][1]);
  m.in[1][0] += 4.0;  // another expert than before counts most
  const auto planted = launch(m.sound, m.in);
  check(!planted.empty() && distance(planted[0], m.y) > kTolerance, what + ": another expert is noticed");
}

}  // namespace

void run_moe_cases() {
  for (const int64_t rows : {1, 6, 64, 65, 150}) {
    for (const bool renormalise : {false, true}) check_mixture(make_mixture(rows, 8, 2, 128, 72, renormalise));
  }
  check_mixture(make_mixture(16, 40, 8, 256, 96, true));
  for (const int64_t rows : {65, 150}) check_mixture(make_mixture(rows, 8, 2, 256, 128, true));  // by grouped products
}

}  // namespace cases
