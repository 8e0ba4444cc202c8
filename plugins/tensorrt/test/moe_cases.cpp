// FusedMoe, FusedMoeFp8 and FusedMoeInt4 against float64.
#include <cmath>
#include <numeric>

#include "launch.h"

namespace cases {
namespace {

// Two products, the inner values rounded to 11 bits in between.
constexpr double kTolerance = 2 * kHalfTolerance;
// Of more than 64 rows quantised weights are rounded to 11 bits too.
constexpr double kPackedTolerance = 2 * kTolerance;

struct Mixture {
  Sound sound;
  std::vector<Host> in;
  Host y;
};

struct Experts {
  std::vector<double> gate_up, down;  // [E, 2 * I, H] and [E, H, I]
};

// Adds the answer.
void mix(Mixture& m, const Experts& weights, int64_t width, int32_t top_k, bool renormalise) {
  const int64_t rows = m.sound.in[0].sizes[0], hidden = m.sound.in[0].sizes[1], experts = m.sound.in[1].sizes[1];
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
      const double* gate_up = &weights.gate_up[order[k] * 2 * width * hidden];
      const double* down = &weights.down[order[k] * hidden * width];
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
}

Mixture make_mixture(int64_t rows, int64_t experts, int32_t top_k, int64_t hidden, int64_t width, bool renormalise) {
  Mixture m{fused_moe(DataType::kHALF, rows, experts, top_k, hidden, width, renormalise), {}, {}};
  const double scale = 1.0 / std::sqrt(static_cast<double>(hidden));
  m.in = {normal(m.sound.in[0]), normal(m.sound.in[1]), normal(m.sound.in[2], scale), normal(m.sound.in[3], scale)};
  mix(m, {m.in[2].values, m.in[3].values}, width, top_k, renormalise);
  return m;
}

// The experts of `sound` one after the other, each drawn by `draw(N, K)`.
template <typename Draw>
Mixture make_packed(Sound sound, int64_t experts, int64_t hidden, int64_t width, int32_t top_k, Draw draw) {
  Mixture m{std::move(sound), {}, {}};
  m.in = {normal(m.sound.in[0], 0.1), normal(m.sound.in[1])};  // weights of a few units
  Experts weights;
  std::vector<Host> constants[2];
  for (const bool is_down : {false, true}) {
    std::vector<double>& values = is_down ? weights.down : weights.gate_up;
    std::vector<Host>& stored = constants[is_down];
    for (int64_t expert = 0; expert < experts; ++expert) {
      const PackedHost one = is_down ? draw(hidden, width) : draw(2 * width, hidden);
      values.insert(values.end(), one.values.begin(), one.values.end());
      stored.resize(one.constants.size());
      for (size_t i = 0; i < stored.size(); ++i) {
        const std::vector<double>& more = one.constants[i].values;
        stored[i].values.insert(stored[i].values.end(), more.begin(), more.end());
      }
    }
  }
  for (const std::vector<Host>& stored : constants) m.in.insert(m.in.end(), stored.begin(), stored.begin() + 2);
  for (const std::vector<Host>& stored : constants) m.in.insert(m.in.end(), stored.begin() + 2, stored.end());
  mix(m, weights, width, top_k, true);
  return m;
}

void check_mixture(Mixture m, double tolerance = kTolerance) {
  const std::string what = m.sound.op + " rows=" + std::to_string(m.sound.in[0].sizes[0]);
  compare(what, launch(m.sound, m.in), 0, m.y, tolerance);
  compare(what + " while building", launch(m.sound, m.in, {true, true, false}), 0, m.y, tolerance);
  compare(what + " captured", launch(m.sound, m.in, {true, false, true}), 0, m.y, tolerance);
  std::swap(m.in[1][0], m.in[1][1]);
  m.in[1][0] += 4.0;  // another expert than before counts most
  const auto planted = launch(m.sound, m.in);
  check(!planted.empty() && distance(planted[0], m.y) > tolerance, what + ": another expert is noticed");
}

}  // namespace

void run_moe_cases() {
  for (const int64_t rows : {1, 6, 64, 65, 150}) {
    for (const bool renormalise : {false, true}) check_mixture(make_mixture(rows, 8, 2, 128, 72, renormalise));
  }
  check_mixture(make_mixture(16, 40, 8, 256, 96, true));
  for (const int64_t rows : {65, 150}) check_mixture(make_mixture(rows, 8, 2, 256, 128, true));  // by grouped products
  constexpr int64_t kExperts = 6, kHidden = 256, kWidth = 128;
  constexpr int32_t kTopK = 2;
  for (const int64_t rows : {1, 7, 16, 64, 65, 150}) {
    for (const bool blocks : {false, true}) {
      const auto draw = [&](int64_t outer, int64_t inner) {
        return draw_bytes(true, outer, inner, blocks ? (outer + 127) / 128 : outer, blocks ? inner / 128 : 1);
      };
      check_mixture(make_packed(fused_moe_fp8(rows, kExperts, kTopK, kHidden, kWidth, blocks), kExperts, kHidden,
                                kWidth, kTopK, draw),
                    kPackedTolerance);
    }
    for (const int64_t group : {32, 64, 128}) {
      for (const bool zeros : {false, true}) {
        const auto draw = [&](int64_t outer, int64_t inner) { return draw_int4(outer, inner, group, zeros); };
        check_mixture(make_packed(fused_moe_int4(rows, kExperts, kTopK, kHidden, kWidth, group, zeros), kExperts,
                                  kHidden, kWidth, kTopK, draw),
                      kPackedTolerance);
      }
    }
  }
}

}  // namespace cases
