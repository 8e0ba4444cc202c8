// LinearFp8, LinearInt8 and LinearInt4 against float64: weights drawn as they are packed, and read by the order that
// kernels/packed_weight.cuh states.
#include <cmath>

#include "launch.h"

namespace cases {
namespace {

constexpr int64_t kInner = 512, kOuter = 208;  // no multiple of 128
// Of more rows the weight is rounded to 11 bits too.
constexpr double kDequantisedTolerance = 2 * kHalfTolerance;
// With wrong codes. With one token a row is a single sum, of which a small scale or chance leaves less than a tolerance;
// of sixteen rows together it cannot.
constexpr int64_t kPlantedRows = 16;

double half_of(int bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
}

std::vector<unsigned char> drawn(size_t count, int below) {
  std::uniform_int_distribution<int> draw(0, below - 1);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(draw(generator));
  return bytes;
}

// 16-bit scales near 0.01, in bytes.
std::vector<unsigned char> drawn_scales(size_t count) {
  std::uniform_int_distribution<int> draw(0x1C00, 0x2400);
  std::vector<unsigned char> bytes;
  for (size_t i = 0; i < count; ++i) {
    const int bits = draw(generator);
    bytes.push_back(static_cast<unsigned char>(bits & 255));
    bytes.push_back(static_cast<unsigned char>(bits >> 8));
  }
  return bytes;
}

struct Packed {
  Sound sound;
  std::vector<Host> in;
  std::vector<double> weight;  // [N, K]
};

Packed draw_linear(Sound sound, PackedHost weight) {
  Packed p{std::move(sound), {}, std::move(weight.values)};
  p.in = {normal(p.sound.in[0])};
  p.in.insert(p.in.end(), weight.constants.begin(), weight.constants.end());
  return p;
}

void check_packed(Packed p, const std::string& kind) {
  const int64_t rows = p.sound.in[0].sizes[0];
  Host y;
  for (int64_t i = 0; i < rows * kOuter; ++i) {
    double sum = 0.0;
    for (int64_t k = 0; k < kInner; ++k) sum += p.in[0][i / kOuter * kInner + k] * p.weight[i % kOuter * kInner + k];
    y.values.push_back(sum);
  }
  const double tolerance = rows <= 64 ? kHalfTolerance : kDequantisedTolerance;
  const std::string what = kind + " rows=" + std::to_string(rows);
  compare(what, launch(p.sound, p.in), 0, y, tolerance);
  compare(what + " while building", launch(p.sound, p.in, {true, true, false}), 0, y, tolerance);
  compare(what + " captured", launch(p.sound, p.in, {true, false, true}), 0, y, tolerance);
  for (int64_t word = 0; word < kPlantedRows * p.sound.in[1].sizes[1]; ++word) {
    p.in[1][word] = static_cast<int32_t>(p.in[1][word]) ^ 0x04040404;
  }
  const auto planted = launch(p.sound, p.in);
  check(!planted.empty() && distance(planted[0], y) > tolerance, what + ": planted rows of codes are noticed");
}

}  // namespace

PackedHost draw_bytes(bool fp8, int64_t outer, int64_t inner, int64_t scale_rows, int64_t scale_columns) {
  PackedHost weight;
  std::vector<unsigned char> bytes = drawn(outer * inner, 256);
  for (unsigned char& byte : bytes) byte = fp8 && (byte & 127) == 127 ? 0 : byte;  // no number
  const Host scale = normal({DataType::kFLOAT, {scale_rows, scale_columns}, {}}, 0.01);
  weight.values.resize(bytes.size());
  for (int64_t i = 0; i < outer * inner; ++i) {
    const int64_t row = i / inner, at = i % inner, lane = at % 64 / 16;
    const int64_t column = at / 64 * 64 + at % 16 / 4 * 16 + 2 * lane + at % 2 + at % 4 / 2 * 8;
    const int64_t scale_row = scale_rows == outer ? row : scale_rows == 1 ? 0 : row / 128;
    const int64_t scale_column = scale_columns == 1 ? 0 : column / 128;
    const double value = fp8 ? e4m3(bytes[i]) : bytes[i] - 128;
    weight.values[row * inner + column] = value * scale[scale_row * scale_columns + scale_column];
  }
  weight.constants = {words_of(bytes), scale};
  return weight;
}

PackedHost draw_int4(int64_t outer, int64_t inner, int64_t group, bool zeros) {
  PackedHost weight;
  const int64_t groups = inner / group;
  const std::vector<unsigned char> bytes = drawn(outer * inner / 2, 256), scales = drawn_scales(outer * groups),
                                   zero = drawn(outer * groups, 16);
  weight.values.resize(outer * inner);
  for (int64_t i = 0; i < outer * inner; ++i) {
    const int64_t row = i / inner, at = i % inner, word = at / 8, nibble = at % 8, lane = word % 16 / 4;
    const int64_t column =
        word / 16 * 128 + word % 4 * 32 + nibble % 4 / 2 * 16 + nibble % 2 * 8 + 2 * lane + nibble / 4;
    const int code = bytes[i / 2] >> (nibble % 2 * 4) & 15;
    const int64_t g = row * groups + column / group;
    const double scale = half_of(scales[2 * g] | scales[2 * g + 1] << 8);
    weight.values[row * inner + column] = (code - (zeros ? zero[g] : 8)) * scale;
  }
  weight.constants = {words_of(bytes), words_of(scales)};
  if (zeros) weight.constants.push_back(words_of(zero));
  return weight;
}

void run_packed_cases(bool with_cublas) {
  for (const int64_t rows : {1, 8, 16, 40, 64, 65, 200}) {
    if (rows > 64 && !with_cublas) continue;
    for (const auto& [scale_rows, scale_columns] :
         {std::pair<int64_t, int64_t>{kOuter, 1}, {1, 1}, {2, kInner / 128}, {kOuter, kInner / 128}}) {
      const std::string scales = std::to_string(scale_rows) + "x" + std::to_string(scale_columns);
      for (const std::string op : {"LinearFp8", "LinearInt8"}) {
        const bool fp8 = op == "LinearFp8";
        check_packed(draw_linear(byte_linear(op, rows, kInner, kOuter, scale_rows, scale_columns),
                                 draw_bytes(fp8, kOuter, kInner, scale_rows, scale_columns)),
                     op + " scales=" + scales);
      }
    }
    for (const int64_t group : {32, 64, 128}) {
      for (const bool zeros : {false, true}) {
        check_packed(draw_linear(linear_int4(rows, kInner, kOuter, group, zeros),
                                 draw_int4(kOuter, kInner, group, zeros)),
                     "LinearInt4 group=" + std::to_string(group) + (zeros ? " with zero points" : ""));
      }
    }
  }
}

}  // namespace cases
