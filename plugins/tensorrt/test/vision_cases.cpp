// VisionAttention, launched by a loaded copy as a runtime does, against float64 on the host.
#include <cmath>
#include <numeric>

#include "launch.h"

namespace cases {
namespace {

// As in tests/plugins/test_vision_attention.py: the weights and the output are rounded once, q and k after a rotation.
constexpr double kHalfVisionTolerance = 7e-4, kFloatVisionTolerance = 3e-6;

struct VisionCase {
  std::vector<int> frames;  // patches of each
  int32_t heads, dim;
};

// q, k or v of every patch and head, turned as the op turns q and k and rounded to T.
std::vector<double> turned(const Sound& s, const std::vector<Host>& in, int part, int32_t heads, int32_t dim) {
  const int64_t patches = s.in[0].sizes[0], width = int64_t{heads} * dim, half = dim / 2;
  std::vector<double> rows(patches * width);
  for (int64_t i = 0; i < patches * width; ++i) rows[i] = in[0][(i / width * 3 + part) * width + i % width];
  for (int64_t i = 0; part < 2 && i < patches * heads * half; ++i) {
    const int64_t pair = i % half, patch = i / (heads * half);
    double& low = rows[i / half * dim + pair];
    double& high = rows[i / half * dim + pair + half];
    const auto position = static_cast<float>(in[1][static_cast<int64_t>(in[3][pair]) * patches + patch]);
    const double angle = position * static_cast<float>(in[2][pair]), before = low;
    low = rounded(before * std::cos(angle) - high * std::sin(angle), s.in[0].type);
    high = rounded(high * std::cos(angle) + before * std::sin(angle), s.in[0].type);
  }
  return rows;
}

Host attended(const Sound& s, const std::vector<Host>& in, const VisionCase& c) {
  const int64_t width = int64_t{c.heads} * c.dim;
  const auto q = turned(s, in, 0, c.heads, c.dim), k = turned(s, in, 1, c.heads, c.dim),
             v = turned(s, in, 2, c.heads, c.dim);
  Host out;
  out.values.assign(q.size(), 0.0);
  int64_t start = 0;
  for (const int length : c.frames) {
    for (int64_t i = 0; i < int64_t{length} * length * c.heads; i += length) {
      const int64_t row = (start + i / length / c.heads) * width + i / length % c.heads * c.dim;
      double total = 0.0;
      for (int64_t other = start; other < start + length; ++other) {
        const int64_t seen = other * width + row % width;
        const double score = std::inner_product(&q[row], &q[row] + c.dim, &k[seen], 0.0);
        const double weight = std::exp(score * static_cast<float>(1.0 / std::sqrt(c.dim)));
        total += weight;
        for (int32_t e = 0; e < c.dim; ++e) out[row + e] += weight * v[seen + e];
      }
      for (int32_t e = 0; e < c.dim; ++e) out[row + e] /= total;
    }
    start += length;
  }
  return out;
}

std::vector<Host> make_inputs(const Sound& s, const VisionCase& c) {
  const int64_t half = c.dim / 2, width = int64_t{c.heads} * c.dim;
  std::vector<Host> in = {normal(s.in[0]), integers(s.in[1], 0, 300), {}, {}, {}};
  for (size_t i = 0; i < in[0].values.size(); ++i) {
    if (static_cast<int64_t>(i) % (3 * width) < width)
      in[0][i] *= 2.0;  // scores of several units: the softmax is no mean
  }
  for (int64_t i = 0; i < half; ++i) {
    in[2].values.push_back(rounded(std::pow(1e4, -2.0 * (i % ((half + 1) / 2)) / half), DataType::kFLOAT));
    in[3].values.push_back(i >= half / 2 ? 1.0 : 0.0);
  }
  int start = 0;
  in[4].values.push_back(0.0);
  for (const int length : c.frames) in[4].values.push_back(start += length);
  return in;
}

// The largest distance of one patch's row: a wrong row is not diluted by the others.
double worst_row(const Host& got, const Host& wanted, int64_t width) {
  double worst = 0.0;
  for (size_t row = 0; row < wanted.values.size(); row += width) {
    const auto part = [&](const Host& all) {
      return Host{std::vector<double>(all.values.begin() + row, all.values.begin() + row + width)};
    };
    worst = std::max(worst, distance(part(got), part(wanted)));
  }
  return worst;
}

void check_vision(DataType t, const VisionCase& c, bool roomy) {
  const int64_t patches = std::accumulate(c.frames.begin(), c.frames.end(), int64_t{0});
  const auto num_frames = static_cast<int64_t>(c.frames.size());
  Sound s = vision_attention(t, patches, num_frames, c.heads, c.dim);
  if (roomy) {  // an engine's largest profile, of which this is a small part
    s.in[0].max_sizes = {patches + 1000, s.in[0].sizes[1]};
    s.in[1].max_sizes = {2, patches + 1000};
    s.in[4].max_sizes = {num_frames + 101};
    s.out[0].max_sizes = {patches + 1000, s.out[0].sizes[1]};
  }
  std::vector<Host> in = make_inputs(s, c);
  const Host out = attended(s, in, c);
  const double tolerance = t == DataType::kHALF ? kHalfVisionTolerance : kFloatVisionTolerance;
  const std::string what = "VisionAttention T=" + std::to_string(int(t)) + " n=" + std::to_string(patches) +
                           " F=" + std::to_string(num_frames) + " D=" + std::to_string(c.dim) +
                           (roomy ? " of a larger profile" : "");
  const std::pair<const char*, Mode> modes[] = {
      {"", {true, false, false}}, {" while building", {true, true, false}}, {" captured", {true, false, true}}};
  for (const auto& [name, mode] : modes) {
    const auto got = launch(s, in, mode);
    compare(what + name, got, 0, out, tolerance);
    if (got.empty()) continue;
    const double worst = worst_row(got[0], out, int64_t{c.heads} * c.dim);
    check(worst <= 8 * tolerance, what + name + ": distance of the worst row " + std::to_string(worst));
  }
  const auto noticed = [&](const char* fault, const std::vector<Host>& planted) {
    const auto got = launch(s, planted);
    check(!got.empty() && distance(got[0], out) > 2 * tolerance, what + ": " + fault + " is noticed");
  };
  auto planted = in;
  for (double& axis : planted[3].values) axis = 1.0 - axis;
  if (patches > 8) noticed("an exchanged axis", planted);  // one patch alone sees itself, however it is turned
  planted = in;
  if (num_frames > 1 && c.frames[0] > 1 && c.frames[1] > 1) {
    planted[4][1] += 1.0;
    noticed("a frame that sees its neighbour", planted);
  }
  for (const int low : {-2000000000, 1000000000, -10}) {  // a builder times plugins on inputs of any content
    for (const int i : {1, 3, 4}) planted[i] = integers(s.in[i], low, low < -10 || low > 0 ? low + 1000000000 : 500);
    check(!launch(s, planted, {true, true, false}).empty(), what + ": bounds and axes of any content do no harm");
  }
}

}  // namespace

void run_vision_cases() {
  std::vector<int> rising(40);
  std::iota(rising.begin(), rising.end(), 0);
  for (const DataType t : {DataType::kHALF, DataType::kFLOAT}) {
    for (const bool roomy : {false, true}) {
      for (const int32_t dim : {64, 72, 80, 128}) {
        check_vision(t, {{1}, 2, dim}, roomy);
        check_vision(t, {{8, 1, 7}, 2, dim}, roomy);
        check_vision(t, {{260, 36, 328}, 3, dim}, roomy);
      }
      check_vision(t, {{128, 0, 192, 0}, 2, 72}, roomy);  // tiles filled exactly; empty frames
      check_vision(t, {{0, 0, 65}, 2, 72}, roomy);
      check_vision(t, {rising, 1, 72}, roomy);  // more frames than a warp has lanes
      check_vision(t, {{100, 0, 29}, 2, 44}, roomy);
      check_vision(t, {{129}, 2, 96}, roomy);
    }
  }
}

}  // namespace cases
