// TreeAttention, launched by a loaded copy as a runtime does, against float64 on the host.
#include <algorithm>
#include <cmath>

#include "launch.h"

namespace cases {
namespace {

struct TreeCase {
  Sound sound;
  std::vector<Host> in;
  Host out, k_cache, v_cache;
};

// A cache: what the plugin is given and, of FP8, its bytes; what it holds as numbers; and its heads' scales.
struct Cache {
  Host stored, values;
  std::vector<unsigned char> bytes;
  std::vector<double> scales;
  int32_t dim;

  void draw(const Tensor& tensor) {
    if (scales.empty()) {
      stored = values = normal(tensor);
      return;
    }
    std::uniform_int_distribution<int> below(0, 0x7E);  // 0x7F is no number
    for (int64_t i = 0; i < 4 * count_of(tensor); ++i) {
      bytes.push_back(static_cast<unsigned char>(below(generator) | (i * 7 % 3 == 0 ? 0x80 : 0)));
      values.values.push_back(e4m3(bytes.back()) * scale(i));
    }
    stored = words_of(bytes);
  }

  double scale(int64_t i) const { return scales[i / dim % scales.size()]; }

  // What is nearest, of two the even one; what is larger than the largest becomes that.
  void write(int64_t at, double x) {
    if (scales.empty()) {
      stored[at] = values[at] = x;
      return;
    }
    const float held = static_cast<float>(x) * (1.0f / static_cast<float>(scale(at)));
    int best = 0;
    for (int byte = 1; byte < 0x7F; ++byte) {
      const double further = std::abs(e4m3(byte) - std::abs(held)) - std::abs(e4m3(best) - std::abs(held));
      if (further < 0.0 || (further == 0.0 && byte % 2 == 0)) best = byte;
    }
    bytes[at] = static_cast<unsigned char>(held < 0.0f ? best | 0x80 : best);
    values[at] = e4m3(bytes[at]) * scale(at);
  }

  Host written() const { return scales.empty() ? stored : words_of(bytes); }
};

TreeCase make_tree(DataType t, DataType mask, bool fp8, const TreeSizes& z, const std::vector<int>& past) {
  TreeCase c{tree_attention(t, z, mask, fp8), {}, {}, {}, {}};
  for (int i = 0; i < 3; ++i) c.in.push_back(normal(c.sound.in[i]));
  Cache caches[2];
  Host kv_scales;
  for (int kind = 0; kind < 2; ++kind) {
    caches[kind].dim = z.dim;
    for (int head = 0; fp8 && head < z.heads_kv; ++head) {
      caches[kind].scales.push_back(static_cast<float>(0.004 + 0.003 * head + 0.002 * kind));
      kv_scales.values.push_back(caches[kind].scales.back());
    }
    caches[kind].draw(c.sound.in[3 + kind]);
    c.in.push_back(caches[kind].stored);
  }
  Host pasts, queries, table;
  std::vector<int> pages(z.slots / z.page_size - 1);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int>(i) + 1;  // page 0 is nobody's
  std::shuffle(pages.begin(), pages.end(), generator);
  for (int64_t b = 0; b < z.batch; ++b) {
    pasts.values.push_back(past[b]);
    queries.values.push_back(static_cast<double>(b == 1 ? z.num_new - 1 : z.num_new));
    for (int64_t p = 0; p < z.pages_per_row; ++p) table.values.push_back(pages[b * z.pages_per_row + p]);
  }
  Host seen = integers(c.sound.in[8], 0, 1);
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t i = 0; i < z.num_new; ++i) {
      for (int64_t m = 0; m < z.tail; ++m) {
        const int64_t self = z.tail - z.num_new + i;
        double& bit = seen[(b * z.num_new + i) * z.tail + m];
        bit = m == self ? 1.0 : m > self ? 0.0 : bit;
      }
    }
  }
  c.in.insert(c.in.end(), {pasts, queries, table, seen});
  if (fp8) c.in.push_back(kv_scales);
  const int64_t kv_width = int64_t{z.heads_kv} * z.dim, group = z.heads / z.heads_kv;
  const auto slot = [&](int64_t b, int64_t place) {
    return static_cast<int64_t>(table[b * z.pages_per_row + place / z.page_size]) * z.page_size + place % z.page_size;
  };
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t i = 0; i < static_cast<int64_t>(queries[b]); ++i) {
      const int64_t to = slot(b, past[b] + z.tail - z.num_new + i) * kv_width, from = (b * z.num_new + i) * kv_width;
      for (int64_t e = 0; e < kv_width; ++e) {
        caches[0].write(to + e, c.in[1][from + e]);
        caches[1].write(to + e, c.in[2][from + e]);
      }
    }
  }
  c.out.values.assign(count_of(c.sound.out[0]), 0.0);
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t i = 0; i < static_cast<int64_t>(queries[b]); ++i) {
      for (int64_t h = 0; h < z.heads; ++h) {
        const double* q = &c.in[0][((b * z.num_new + i) * z.heads + h) * z.dim];
        double* out = &c.out[((b * z.num_new + i) * z.heads + h) * z.dim];
        double total = 0.0;
        for (int64_t place = 0; place < past[b] + z.tail; ++place) {
          if (place >= past[b] && seen[(b * z.num_new + i) * z.tail + place - past[b]] == 0.0) continue;
          const int64_t row = (slot(b, place) * z.heads_kv + h / group) * z.dim;
          double score = 0.0;
          for (int64_t e = 0; e < z.dim; ++e) score += q[e] * caches[0].values[row + e];
          const double weight = std::exp(score / 8);
          total += weight;
          for (int64_t e = 0; e < z.dim; ++e) out[e] += weight * caches[1].values[row + e];
        }
        for (int64_t e = 0; e < z.dim; ++e) out[e] /= total;
      }
    }
  }
  c.k_cache = caches[0].written();
  c.v_cache = caches[1].written();
  return c;
}

void check_tree(DataType t, DataType mask, bool fp8, const TreeSizes& z, const std::vector<int>& past) {
  TreeCase c = make_tree(t, mask, fp8, z, past);
  const double tolerance = t == DataType::kHALF ? kHalfAttentionTolerance : kFloatAttentionTolerance;
  const std::string what = std::string(fp8 ? "FP8 " : "") + "TreeAttention T=" + std::to_string(int(t)) +
                           " mask=" + std::to_string(int(mask)) +
                           " S=" + std::to_string(z.num_new) + " past=" + std::to_string(past[0]);
  const std::vector<std::pair<std::string, Mode>> modes = {{" one cache memory", {true, false, false}},
                                                           {" two cache memories", {false, false, false}},
                                                           {" while building", {true, true, false}},
                                                           {" captured", {true, false, true}},
                                                           {" without scratch", {true, false, false, true}}};
  for (const int prefetch_safe : {0, 1}) {
    if (prefetch_safe != 0) c.sound.fields.push_back({"prefetch_safe", prefetch_safe});
    for (const auto& [name, mode] : modes) {
      const std::string where = what + name + (prefetch_safe != 0 ? ", prefetch_safe" : "");
      const auto got = launch(c.sound, c.in, mode);
      compare(where, got, 0, c.out, tolerance);
      compare(where, got, 1, c.k_cache, 0.0);
      compare(where, got, 2, c.v_cache, 0.0);
    }
  }
  TreeCase planted = c;
  std::swap(planted.in[7][0], planted.in[7][z.pages_per_row - 1]);
  const auto wrong = launch(planted.sound, planted.in);
  check(!wrong.empty() && distance(wrong[0], c.out) > tolerance, what + ": swapped pages are noticed");
  if (fp8) {
    planted = c;
    std::rotate(planted.in[9].values.begin(), planted.in[9].values.begin() + 1, planted.in[9].values.end());
    const auto scaled = launch(planted.sound, planted.in);
    check(!scaled.empty() && distance(scaled[0], c.out) > tolerance, what + ": scales of other heads are noticed");
  }
  for (const int low : {-2000000000, 1000000000}) {
    for (int i = 5; i < 8; ++i) planted.in[i] = integers(planted.sound.in[i], low, low + 1000000000);
    check(!launch(planted.sound, planted.in, {true, true, false}).empty(),
          what + ": lengths and pages of any content do no harm while building");
  }
}

}  // namespace

void run_tree_cases() {
  for (const DataType t : {DataType::kHALF, DataType::kFLOAT}) {
    for (const DataType mask : {DataType::kBOOL, DataType::kINT32}) {
      for (const bool fp8 : {false, true}) {
        check_tree(t, mask, fp8, {2, 5, 7, 4, 16, 160, 4, 2, 64}, {23, 0});
        check_tree(t, mask, fp8, {1, 1, 1, 256, 16, 4128, 16, 8, 128}, {4000});
        check_tree(t, mask, fp8, {1, 16, 16, 256, 16, 4128, 16, 8, 128}, {4000});
        check_tree(t, mask, fp8, {2, 40, 43, 64, 64, 8320, 8, 2, 64}, {2000, 4000});
      }
    }
    check_tree(t, DataType::kBOOL, true, {1, 300, 300, 8, 64, 576, 4, 2, 128}, {100});  // of a prompt
  }
}

}  // namespace cases
