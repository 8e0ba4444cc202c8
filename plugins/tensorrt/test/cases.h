// What the cases share: a count of failed checks, and sound nodes of each op to start from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "driver.h"
#include "stand_in.h"

namespace cases {

using driver::Field;
using driver::Tensor;
using driver::Tensors;
using nvinfer1::DataType;

inline int failed = 0, checked = 0;

inline bool check(bool holds, const std::string& what) {
  ++checked;
  if (!holds) {
    ++failed;
    std::printf("FAILED  %s\n", what.c_str());
  }
  return holds;
}

// A node of an op: its attributes and, for one choice of types, its tensors.
struct Sound {
  std::string op;
  std::vector<Field> fields;
  Tensors in, out;

  Tensors all() const {
    Tensors tensors = in;
    tensors.insert(tensors.end(), out.begin(), out.end());
    return tensors;
  }
};

constexpr int32_t kOnnxFloat = 1, kOnnxHalf = 10, kOnnxFp8 = 17;

inline int32_t onnx_of(DataType type) { return type == DataType::kHALF ? kOnnxHalf : kOnnxFloat; }

// T of weight and y; x and, if there is one, the residual.
inline Sound add_rms_norm(DataType t, DataType x, const DataType* residual, int64_t rows, int64_t hidden) {
  Sound s{"AddRmsNorm", {{"epsilon", 1e-6}, {"compute_type", onnx_of(t)}, {"x_type", onnx_of(x)}}, {}, {}};
  s.in = {{x, {rows, hidden}, {64, hidden}}, {t, {hidden}, {}}};
  s.out = {{t, {rows, hidden}, {64, hidden}}};
  s.fields.emplace_back("num_outputs", residual != nullptr ? 2 : 1);
  if (residual != nullptr) {
    s.fields.emplace_back("residual_type", onnx_of(*residual));
    s.in.push_back({*residual, {rows, hidden}, {64, hidden}});
    s.out.push_back({*residual, {rows, hidden}, {64, hidden}});
  }
  return s;
}

inline Sound qk_norm_mrope(DataType t, bool norm, int64_t batch, int64_t seq, int32_t heads, int32_t heads_kv,
                           int32_t dim) {
  const int64_t n = batch < 0 ? -1 : batch * seq, width = int64_t{heads + 2 * heads_kv} * dim;
  Sound s{"QKNormMRope",
          {{"num_heads", heads}, {"num_kv_heads", heads_kv}, {"head_dim", dim}, {"compute_type", onnx_of(t)}},
          {},
          {}};
  s.in = {{t, {n, width}, {64, width}},
          {DataType::kINT32, {3, batch, seq}, {3, 4, 16}},
          {DataType::kFLOAT, {dim / 2}, {}},
          {DataType::kINT32, {dim / 2}, {}}};
  if (norm) {
    s.fields.emplace_back("epsilon", 1e-6);
    s.in.push_back({t, {dim}, {}});
    s.in.push_back({t, {dim}, {}});
  }
  for (const int64_t count : {heads, heads_kv, heads_kv}) s.out.push_back({t, {n, count * dim}, {64, count * dim}});
  return s;
}

struct TreeSizes {
  int64_t batch, num_new, tail, pages_per_row, page_size, slots;
  int32_t heads, heads_kv, dim;
};

// `fp8`: of caches of FP8, four numbers in an int32, and their scales.
inline Sound tree_attention(DataType t, const TreeSizes& z, DataType mask = DataType::kBOOL, bool fp8 = false) {
  const int64_t n = z.batch < 0 ? -1 : z.batch * z.num_new;
  const int64_t q = int64_t{z.heads} * z.dim, kv = int64_t{z.heads_kv} * z.dim;
  const int64_t most_new = std::max<int64_t>(16, z.num_new), most_tail = std::max<int64_t>(16, z.tail);
  const int64_t most_pages = std::max<int64_t>(16, z.pages_per_row), most_rows = std::max<int64_t>(64, n);
  Sound s{"TreeAttention",
          {{"num_heads", z.heads},
           {"num_kv_heads", z.heads_kv},
           {"page_size", static_cast<int32_t>(z.page_size)},
           {"scale", 1.0 / 8},
           {"compute_type", onnx_of(t)}},
          {},
          {}};
  const int64_t wide = fp8 ? z.dim / 4 : z.dim;
  const Tensor cache{
      fp8 ? DataType::kINT32 : t, {z.slots, z.heads_kv, wide}, {z.slots < 0 ? 4096 : z.slots, z.heads_kv, wide}};
  s.in = {{t, {n, q}, {most_rows, q}},
          {t, {n, kv}, {most_rows, kv}},
          {t, {n, kv}, {most_rows, kv}},
          cache,
          cache,
          {DataType::kINT32, {z.batch}, {4}},
          {DataType::kINT32, {z.batch}, {4}},
          {DataType::kINT32, {z.batch, z.pages_per_row}, {4, most_pages}},
          {mask, {z.batch, z.num_new, z.tail}, {4, most_new, most_tail}}};
  if (fp8) {
    s.fields.emplace_back("kv_type", kOnnxFp8);
    s.in.push_back({DataType::kFLOAT, {2, z.heads_kv}, {}});
  }
  s.out = {{t, {n, q}, {most_rows, q}}, cache, cache};
  return s;
}

inline Sound pick_rows(DataType t, int64_t batch, int64_t num_new, int64_t num_rows, int64_t hidden) {
  const bool dynamic = batch < 0;
  Sound s{"PickRows", {{"compute_type", onnx_of(t)}}, {}, {}};
  s.in = {{t, {dynamic ? -1 : batch * num_new, hidden}, {64, hidden}},
          {DataType::kINT32, {batch, dynamic ? -1 : num_rows}, {4, 16}}};
  s.out = {{t, {dynamic ? -1 : batch * num_rows, hidden}, {64, hidden}}};
  return s;
}

inline Sound linear(DataType t, int64_t rows, int64_t inner, int64_t outer) {
  Sound s{"Linear", {{"compute_type", onnx_of(t)}}, {}, {}};
  s.in = {{t, {rows, inner}, {64, inner}}, {t, {outer, inner}, {}}};
  s.out = {{t, {rows, outer}, {64, outer}}};
  return s;
}

// LinearFp8 or LinearInt8.
inline Sound byte_linear(const std::string& op, int64_t rows, int64_t inner, int64_t outer, int64_t scale_rows,
                         int64_t scale_columns) {
  const DataType t = DataType::kHALF;
  Sound s{op, {{"compute_type", onnx_of(t)}}, {}, {}};
  s.in = {{t, {rows, inner}, {std::max<int64_t>(64, rows), inner}},
          {DataType::kINT32, {outer, inner / 4}, {}},
          {DataType::kFLOAT, {scale_rows, scale_columns}, {}}};
  s.out = {{t, {rows, outer}, {std::max<int64_t>(64, rows), outer}}};
  return s;
}

inline Sound linear_int4(int64_t rows, int64_t inner, int64_t outer, int64_t group, bool zeros) {
  const DataType t = DataType::kHALF;
  Sound s{"LinearInt4", {{"compute_type", onnx_of(t)}, {"scale_type", kOnnxHalf}}, {}, {}};
  s.in = {{t, {rows, inner}, {std::max<int64_t>(64, rows), inner}},
          {DataType::kINT32, {outer, inner / 8}, {}},
          {DataType::kINT32, {outer / 2, inner / group}, {}}};
  if (zeros) s.in.push_back({DataType::kINT32, {outer / 4, inner / group}, {}});
  s.out = {{t, {rows, outer}, {std::max<int64_t>(64, rows), outer}}};
  return s;
}

inline Sound fused_moe(DataType t, int64_t rows, int64_t experts, int32_t top_k, int64_t hidden, int64_t width,
                       bool renormalise = true) {
  Sound s{"FusedMoe", {{"top_k", top_k}, {"renormalise", renormalise ? 1 : 0}, {"compute_type", onnx_of(t)}}, {}, {}};
  const int64_t most = std::max<int64_t>(64, rows);
  s.in = {{t, {rows, hidden}, {most, hidden}},
          {t, {rows, experts}, {most, experts}},
          {t, {experts, 2 * width, hidden}, {}},
          {t, {experts, hidden, width}, {}}};
  s.out = {{t, {rows, hidden}, {most, hidden}}};
  return s;
}

// FusedMoeFp8; `blocks`: a scale for each 128 rows and 128 columns, else one for each row.
inline Sound fused_moe_fp8(int64_t rows, int64_t experts, int32_t top_k, int64_t hidden, int64_t width, bool blocks) {
  Sound s = fused_moe(DataType::kHALF, rows, experts, top_k, hidden, width);
  const auto scale = [&](int64_t outer, int64_t inner) {
    return Tensor{DataType::kFLOAT, {experts, blocks ? (outer + 127) / 128 : outer, blocks ? inner / 128 : 1}, {}};
  };
  s.op = "FusedMoeFp8";
  s.in.resize(2);
  s.in.push_back({DataType::kINT32, {experts, 2 * width, hidden / 4}, {}});
  s.in.push_back(scale(2 * width, hidden));
  s.in.push_back({DataType::kINT32, {experts, hidden, width / 4}, {}});
  s.in.push_back(scale(hidden, width));
  return s;
}

inline Sound fused_moe_int4(int64_t rows, int64_t experts, int32_t top_k, int64_t hidden, int64_t width, int64_t group,
                            bool zeros) {
  Sound s = fused_moe(DataType::kHALF, rows, experts, top_k, hidden, width);
  const auto of_groups = [&](int64_t outer, int64_t inner, int64_t rows_of_word) {
    return Tensor{DataType::kINT32, {experts, outer / rows_of_word, inner / group}, {}};
  };
  s.op = "FusedMoeInt4";
  s.fields.emplace_back("scale_type", kOnnxHalf);
  s.in.resize(2);
  s.in.push_back({DataType::kINT32, {experts, 2 * width, hidden / 8}, {}});
  s.in.push_back(of_groups(2 * width, hidden, 2));
  s.in.push_back({DataType::kINT32, {experts, hidden, width / 8}, {}});
  s.in.push_back(of_groups(hidden, width, 2));
  if (zeros) {
    s.in.push_back(of_groups(2 * width, hidden, 4));
    s.in.push_back(of_groups(hidden, width, 4));
  }
  return s;
}

struct DeltaSizes {
  int64_t batch, num_new, entries;
  int32_t key_heads, value_heads, key_dim, value_dim, taps;
};

inline Sound gated_delta(DataType t, const DeltaSizes& z, DataType mask = DataType::kBOOL) {
  const bool dynamic = z.batch < 0;
  const int64_t n = dynamic ? -1 : z.batch * z.num_new, kept = dynamic ? -1 : std::min<int64_t>(z.num_new, 64);
  const int64_t keys = int64_t{z.key_heads} * z.key_dim, values = int64_t{z.value_heads} * z.value_dim;
  const int64_t channels = 2 * keys + values, width = keys + values + 2 * z.value_heads;
  const int64_t most_new = std::max<int64_t>(16, z.num_new), most_rows = 4 * most_new, most_entries = 16;
  Sound s{"GatedDelta",
          {{"num_k_heads", z.key_heads},
           {"num_v_heads", z.value_heads},
           {"epsilon", 1e-6},
           {"compute_type", onnx_of(t)}},
          {},
          {}};
  const Tensor window{t, {z.entries, z.taps - 1, channels}, {most_entries, z.taps - 1, channels}};
  const Tensor matrices{DataType::kFLOAT,
                        {z.entries, z.value_heads, z.key_dim, z.value_dim},
                        {most_entries, z.value_heads, z.key_dim, z.value_dim}};
  s.in = {{t, {n, channels + values}, {most_rows, channels + values}},
          {t, {n, 2 * z.value_heads}, {most_rows, 2 * z.value_heads}},
          {t, {channels, 1, z.taps}, {}},
          {DataType::kFLOAT, {z.value_heads}, {}},
          {DataType::kFLOAT, {z.value_heads}, {}},
          {t, {z.value_dim}, {}},
          window,
          matrices,
          {DataType::kINT32, {z.batch}, {4}},
          {DataType::kINT32, {z.batch}, {4}},
          {DataType::kINT32, {z.batch}, {4}},
          {mask, {z.batch, z.num_new, z.num_new}, {4, most_new, most_new}}};
  s.out = {{t, {n, values}, {most_rows, values}},
           window,
           matrices,
           {t, {z.batch, kept, channels}, {4, 64, channels}},
           {DataType::kFLOAT, {z.batch, kept, width}, {4, 64, width}}};
  return s;
}

// The input whose memory an output has; -1: it has its own.
inline int32_t aliased_input(const Sound& s, size_t output) {
  if (s.op == "TreeAttention" && output > 0) return static_cast<int32_t>(2 + output);
  if (s.op == "GatedDelta" && (output == 1 || output == 2)) return static_cast<int32_t>(5 + output);
  return -1;
}

inline Sound silu_mul(DataType t, int64_t rows, int64_t width) {
  Sound s{"SiluMul", {{"compute_type", onnx_of(t)}}, {}, {}};
  s.in = {{t, {rows, 2 * width}, {64, 2 * width}}};
  s.out = {{t, {rows, width}, {64, width}}};
  return s;
}

// Of fixed sizes, or with patches and frames unknown (-1).
inline Sound vision_attention(DataType t, int64_t patches, int64_t frames, int32_t heads, int32_t dim) {
  const bool dynamic = patches < 0;
  const int64_t width = int64_t{heads} * dim, most = dynamic ? 640 : patches;
  Sound s{
      "VisionAttention", {{"num_heads", heads}, {"scale", 1.0 / std::sqrt(dim)}, {"compute_type", onnx_of(t)}}, {}, {}};
  s.in = {{t, {patches, 3 * width}, {most, 3 * width}},
          {DataType::kINT32, {2, patches}, {2, most}},
          {DataType::kFLOAT, {dim / 2}, {}},
          {DataType::kINT32, {dim / 2}, {}},
          {DataType::kINT32, {dynamic ? -1 : frames + 1}, {dynamic ? 18 : frames + 1}}};
  s.out = {{t, {patches, width}, {most, width}}};
  return s;
}

void run_host_cases();
void run_cublas_cases(const char* stand_in);  // on the host, with what stands in for libcublas
bool run_gpu_cases();                         // false, with the reason printed, where there is no GPU

}  // namespace cases
