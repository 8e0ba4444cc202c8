// What the plugins say and refuse before anything runs; no GPU.
#include <algorithm>

#include "cases.h"

namespace cases {
namespace {

using nvinfer1::TensorFormat;

// What the cases of all ops go through: dynamic sizes as a builder shows them, and two forms where there are two.
std::vector<Sound> sound_nodes() {
  const DataType half = DataType::kHALF, real = DataType::kFLOAT;
  std::vector<Sound> all;
  for (const DataType t : {half, real}) {
    all.push_back(add_rms_norm(t, t, nullptr, -1, 64));
    all.push_back(add_rms_norm(t, real, nullptr, -1, 64));
    all.push_back(add_rms_norm(t, t, &t, -1, 64));
    all.push_back(add_rms_norm(t, t, &real, -1, 64));
    all.push_back(add_rms_norm(t, real, &real, -1, 64));
    all.push_back(qk_norm_mrope(t, false, -1, -1, 4, 2, 64));
    all.push_back(qk_norm_mrope(t, true, -1, -1, 4, 2, 64));
    all.push_back(tree_attention(t, {-1, -1, -1, -1, 16, -1, 4, 2, 64}));
    all.push_back(tree_attention(t, {-1, -1, -1, -1, 16, -1, 4, 2, 64}, DataType::kINT32));
    all.push_back(tree_attention(t, {-1, -1, -1, -1, 16, -1, 4, 2, 64}, DataType::kBOOL, true));
    all.push_back(pick_rows(t, -1, -1, -1, 64));
    all.push_back(linear(t, -1, 64, 96));
    all.push_back(silu_mul(t, -1, 64));
    all.push_back(vision_attention(t, -1, -1, 2, 72));
  }
  all.push_back(fused_moe(half, -1, 8, 2, 64, 48));
  for (const bool blocks : {false, true}) all.push_back(fused_moe_fp8(-1, 8, 2, 256, 128, blocks));
  for (const bool zeros : {false, true}) all.push_back(fused_moe_int4(-1, 8, 2, 256, 128, 64, zeros));
  for (const DataType t : {half, real}) {
    all.push_back(gated_delta(t, {-1, -1, -1, 2, 4, 16, 12, 4}));
    all.push_back(gated_delta(t, {-1, -1, -1, 2, 4, 16, 12, 4}, DataType::kINT32));
  }
  for (const char* op : {"LinearFp8", "LinearInt8"}) all.push_back(byte_linear(op, -1, 256, 96, 96, 1));
  for (const bool zeros : {false, true}) all.push_back(linear_int4(-1, 256, 96, 64, zeros));
  return all;
}

std::string label(const Sound& s, const std::string& what) {
  return s.op + " (" + std::to_string(s.in.size()) + " inputs): " + what;
}

bool supports_all(driver::Plugin& plugin, const Tensors& all, size_t num_inputs) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (!plugin.supports(all, static_cast<int32_t>(i), static_cast<int32_t>(num_inputs))) return false;
  }
  return true;
}

void check_creators() {
  check(stand_in::creators().size() == 14, "fourteen creators register themselves when the library is loaded");
  const std::vector<std::string> heads = {"num_heads", "num_kv_heads"};
  check(driver::field_names("AddRmsNorm") ==
            std::vector<std::string>{"epsilon", "num_outputs", "compute_type", "x_type", "residual_type", "weight_offset"},
        "fields of AddRmsNorm");
  check(driver::field_names("QKNormMRope") ==
            std::vector<std::string>{"num_heads", "num_kv_heads", "head_dim", "epsilon", "compute_type", "weight_offset"},
        "fields of QKNormMRope");
  check(driver::field_names("TreeAttention") ==
            std::vector<std::string>{"num_heads", "num_kv_heads", "page_size", "scale", "compute_type", "prefetch_safe",
                                     "kv_type", "window", "anchor_window"},
        "fields of TreeAttention");
  check(driver::field_names("VisionAttention") == std::vector<std::string>{"num_heads", "scale", "compute_type"},
        "fields of VisionAttention");
  check(driver::field_names("GatedDelta") ==
            std::vector<std::string>{"num_k_heads", "num_v_heads", "epsilon", "compute_type", "prefetch_safe"},
        "fields of GatedDelta");
  check(driver::field_names("LinearInt4") == std::vector<std::string>{"compute_type", "scale_type"},
        "fields of LinearInt4");
  const std::vector<std::string> mixture = {"top_k", "renormalise", "compute_type"};
  for (const char* op : {"FusedMoe", "FusedMoeFp8"}) {
    check(driver::field_names(op) == mixture, std::string("fields of ") + op);
  }
  check(driver::field_names("FusedMoeInt4") ==
            std::vector<std::string>{"top_k", "renormalise", "compute_type", "scale_type"},
        "fields of FusedMoeInt4");
  for (const char* op : {"PickRows", "Linear", "LinearFp8", "LinearInt8", "SiluMul"}) {
    check(driver::field_names(op) == std::vector<std::string>{"compute_type"}, std::string("fields of ") + op);
  }
  check(driver::field_names("NoSuchOp").empty(), "no creator under another name");
}

// The order in which a builder asks, down to a loaded copy; what it is told must not change on the way.
void check_life(const Sound& s) {
  auto made = driver::create(s.op, s.fields);
  if (!check(made != nullptr, label(s, "is created: " + stand_in::take_log()))) return;
  auto plugin = made->clone();
  made.reset();
  check(plugin->num_outputs() == static_cast<int32_t>(s.out.size()), label(s, "number of outputs"));
  std::vector<DataType> types;
  for (const Tensor& tensor : s.out) types.push_back(tensor.type);
  check(plugin->output_types(s.in) == types, label(s, "output types"));
  const auto shapes = plugin->output_shapes(s.in);
  if (check(shapes.has_value(), label(s, "shapes: " + stand_in::take_log()))) {
    for (size_t i = 0; i < s.out.size(); ++i) {
      bool same = (*shapes)[i].size() == s.out[i].sizes.size();
      for (size_t axis = 0; same && axis < s.out[i].sizes.size(); ++axis) {
        const int64_t wanted = s.out[i].sizes[axis], got = (*shapes)[i][axis];
        same = wanted < 0 ? got < 0 : got == wanted;
      }
      check(same, label(s, "shape of output " + std::to_string(i)));
    }
    if (s.op == "TreeAttention") {
      check((*shapes)[1][0] != (*shapes)[0][0], label(s, "slots of the cache are not the number of tokens"));
    }
  }
  check(supports_all(*plugin, s.all(), s.in.size()), label(s, "takes its own types: " + stand_in::take_log()));
  check(plugin->configure(s.in, s.out), label(s, "is configured"));
  check(stand_in::take_log().empty(), label(s, "has nothing to complain about"));
  for (int32_t i = 0; i < plugin->num_outputs(); ++i) {
    const int32_t wanted = aliased_input(s, static_cast<size_t>(i)), got = plugin->aliased_input(i);
    check(got == -2 || got == wanted, label(s, "aliased input of output " + std::to_string(i)));
  }
  const std::vector<char> bytes = plugin->serialize();
  auto loaded = driver::deserialize(s.op, bytes);
  if (!check(loaded != nullptr, label(s, "is loaded: " + stand_in::take_log()))) return;
  check(loaded->serialize() == bytes, label(s, "a loaded node writes the same bytes"));
  check(loaded->clone()->serialize() == bytes, label(s, "so does its clone"));

  auto refuse = [&](std::vector<char> changed, const std::string& what, const std::string& said) {
    check(driver::deserialize(s.op, changed) == nullptr, label(s, what + " is refused"));
    const std::string log = stand_in::take_log();
    check(log.find(said) != std::string::npos, label(s, what + " is refused with a reason, got: " + log));
  };
  refuse(std::vector<char>(bytes.begin(), bytes.begin() + 10), "a short record", "truncated");
  refuse(std::vector<char>(bytes.begin(), bytes.end() - 1), "a record cut at its end", "bytes, expected");
  refuse({}, "an empty record", "truncated");
  auto other = bytes;
  other[0] ^= 1;
  refuse(other, "foreign bytes", "not one of this plugin");
  other = bytes;
  other[4] ^= 1;
  refuse(other, "a record of another version", "another version");
  for (const char* op : {"AddRmsNorm", "QKNormMRope", "TreeAttention", "PickRows", "Linear", "LinearFp8", "LinearInt8",
                         "LinearInt4", "SiluMul", "VisionAttention", "FusedMoe", "FusedMoeFp8", "FusedMoeInt4",
                         "GatedDelta"}) {
    if (op == s.op) continue;
    check(driver::deserialize(op, bytes) == nullptr, label(s, std::string("its bytes are none of ") + op));
  }
  stand_in::take_log();
}

// Pinned types leave one combination; each tensor of another type or layout is refused where it stands.
void check_types(const Sound& s) {
  const auto plugin = driver::create(s.op, s.fields);
  const DataType kinds[] = {DataType::kFLOAT, DataType::kHALF, DataType::kINT8, DataType::kINT32, DataType::kBOOL,
#if NV_TENSORRT_MAJOR >= 10
                            DataType::kBF16,  DataType::kINT64
#endif
  };
  for (size_t i = 0; i < s.all().size(); ++i) {
    for (const DataType kind : kinds) {
      Tensors all = s.all();
      // bool and int32 both
      const bool mask = (s.op == "TreeAttention" && i == 8) || (s.op == "GatedDelta" && i == 11);
      const bool wanted = kind == all[i].type || (mask && (kind == DataType::kINT32 || kind == DataType::kBOOL));
      all[i].type = kind;
      check(plugin->supports(all, static_cast<int32_t>(i), static_cast<int32_t>(s.in.size())) == wanted,
            label(s, "tensor " + std::to_string(i) + " as type " + std::to_string(static_cast<int>(kind))));
    }
    Tensors all = s.all();
    all[i].format = TensorFormat::kCHW32;
    check(!plugin->supports(all, static_cast<int32_t>(i), static_cast<int32_t>(s.in.size())),
          label(s, "tensor " + std::to_string(i) + " in another layout is refused"));
  }
  check(stand_in::take_log().empty(), label(s, "asking for types is no error"));
  Tensors fewer = s.in;
  if (s.op == "LinearInt4") fewer.resize(3);  // that many will do
  if (s.op == "FusedMoeInt4") fewer.resize(6);
  fewer.pop_back();
  for (const DataType type : plugin->output_types(fewer)) {
    check(type == DataType::kFLOAT, label(s, "an input too few: no type follows from those that are there"));
  }
  check(stand_in::take_log().find("expected") != std::string::npos, label(s, "an input too few: says so"));
  const auto given = static_cast<int32_t>(fewer.size());
  fewer.insert(fewer.end(), s.out.begin(), s.out.end());
  check(!plugin->supports(fewer, 0, given), label(s, "a missing input is refused"));
  check(stand_in::take_log().find("expected") != std::string::npos, label(s, "a missing input: says so"));
}

// Without pins every type works, but not a mixture that no kernel computes.
void check_free_types() {
  const auto free = driver::create("AddRmsNorm", {{"epsilon", 1e-6}, {"num_outputs", 2}});
  const DataType half = DataType::kHALF, real = DataType::kFLOAT;
  for (const DataType x : {half, real}) {
    for (const DataType weight : {half, real}) {
      for (const DataType residual : {half, real}) {
        const bool all_same = x == weight && x == residual;
        const bool wanted = all_same || (weight == half && residual == real);
        const Sound s = add_rms_norm(weight, x, &residual, 3, 64);
        check(supports_all(*free, s.all(), 3) == wanted, "AddRmsNorm: free types " + std::to_string(int(x)) + " " +
                                                             std::to_string(int(weight)) + " " +
                                                             std::to_string(int(residual)));
      }
    }
  }
  stand_in::take_log();
}

void check_refused_attributes() {
  const auto refuse = [](const std::string& op, std::vector<Field> fields, const std::string& said) {
    check(driver::create(op, fields) == nullptr, op + ": is refused: " + said);
    const std::string log = stand_in::take_log();
    check(log.find(op + ": " + said) != std::string::npos, op + ": says \"" + said + "\", got: " + log);
  };
  refuse("AddRmsNorm", {}, "epsilon: missing");
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"num_outputs", 3}}, "num_outputs: expected 1 (y) or 2 (y, sum), got 3");
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"x_type", 7}}, "x_type: expected 1 (float32), 10 (float16)");
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"residual_type", 1}}, "residual_type: there is no residual");
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"compute_type", 1}, {"x_type", 10}}, "x_type: expected compute_type or 1");
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"compute_type", 1}, {"residual_type", 10}, {"num_outputs", 2}},
         "residual_type: expected compute_type or 1");
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"compute_type", 10}, {"x_type", 1}, {"num_outputs", 2}},
         "x_type: float32 beside a 16-bit residual");
#if NV_TENSORRT_MAJOR < 10
  refuse("AddRmsNorm", {{"epsilon", 1e-6}, {"compute_type", 16}}, "compute_type: bfloat16 needs TensorRT 10");
#endif
  for (const char* op : {"PickRows", "Linear", "SiluMul"}) {
    refuse(op, {{"compute_type", 7}}, "compute_type: expected 1 (float32), 10 (float16)");
  }
  refuse("LinearFp8", {{"compute_type", 1}}, "compute_type: expected 10 (float16) or 16 (bfloat16), got 1 (float32)");
  refuse("LinearInt4", {{"compute_type", 10}}, "scale_type: missing");
  refuse("LinearInt4", {{"compute_type", 10}, {"scale_type", 1}}, "scale_type: expected 10 (float16) or 16 (bfloat16)");
  refuse("QKNormMRope", {{"num_heads", 4}, {"num_kv_heads", 2}}, "head_dim: missing");
  refuse("QKNormMRope", {{"num_heads", 0}, {"num_kv_heads", 2}, {"head_dim", 64}}, "num_heads: must be positive");
  refuse("QKNormMRope", {{"num_heads", 4}, {"num_kv_heads", 2}, {"head_dim", 66}}, "head_dim: must be a multiple of 4");
  refuse("QKNormMRope", {{"num_heads", 4.5}, {"num_kv_heads", 2}, {"head_dim", 64}}, "num_heads: expected a 32-bit");
  const std::vector<Field> tree = {{"num_kv_heads", 2}, {"page_size", 16}, {"scale", 0.125}};
  auto with = [&](Field field) {
    std::vector<Field> fields = tree;
    fields.push_back(field);
    return fields;
  };
  refuse("TreeAttention", tree, "num_heads: missing");
  refuse("TreeAttention", with({"num_heads", 5}), "num_heads: must be a multiple of num_kv_heads = 2, got 5");
  refuse("TreeAttention", {{"num_heads", 4}, {"num_kv_heads", 2}, {"page_size", 0}, {"scale", 0.1}},
         "page_size: must be positive");
  refuse("TreeAttention", {{"num_heads", 4}, {"num_kv_heads", 2}, {"page_size", 16}}, "scale: missing");
  refuse("TreeAttention", {{"num_heads", 4}, {"num_kv_heads", 2}, {"page_size", 16}, {"scale", 0.0}},
         "scale: must be positive");
  refuse("TreeAttention",
         {{"num_heads", 4}, {"num_kv_heads", 2}, {"page_size", 16}, {"scale", 0.1}, {"kv_type", kOnnxHalf}},
         "kv_type: expected 17 (float8 e4m3fn) or none, got 10");
  for (const char* op : {"FusedMoe", "FusedMoeFp8"}) {
    refuse(op, {{"renormalise", 1}}, "top_k: missing");
    refuse(op, {{"top_k", 17}, {"renormalise", 1}}, "top_k: expected 1 to 16, got 17");
    refuse(op, {{"top_k", 2}, {"renormalise", 2}}, "renormalise: expected 0 or 1, got 2");
    refuse(op, {{"top_k", 2}, {"renormalise", 1}, {"compute_type", 1}},
           "compute_type: expected 10 (float16) or 16 (bfloat16), got 1 (float32)");
  }
  refuse("FusedMoeInt4", {{"top_k", 2}, {"renormalise", 1}}, "scale_type: missing");
  refuse("FusedMoeInt4", {{"top_k", 2}, {"renormalise", 1}, {"scale_type", 1}},
         "scale_type: expected 10 (float16) or 16 (bfloat16), got 1");
  refuse("GatedDelta", {{"num_v_heads", 4}, {"epsilon", 1e-6}}, "num_k_heads: missing");
  refuse("GatedDelta", {{"num_k_heads", 3}, {"num_v_heads", 4}, {"epsilon", 1e-6}},
         "num_v_heads: must be a multiple of num_k_heads = 3, got 4");
  refuse("GatedDelta", {{"num_k_heads", 0}, {"num_v_heads", 4}, {"epsilon", 1e-6}}, "num_k_heads: must be positive");
  refuse("GatedDelta", {{"num_k_heads", 2}, {"num_v_heads", 4}, {"epsilon", -1.0}}, "epsilon: must not be negative");
  refuse("VisionAttention", {{"scale", 0.1}}, "num_heads: missing");
  refuse("VisionAttention", {{"num_heads", 16}}, "scale: missing");
  refuse("VisionAttention", {{"num_heads", 0}, {"scale", 0.1}}, "num_heads: must be positive, at most 65535, got 0");
  refuse("VisionAttention", {{"num_heads", 65536}, {"scale", 0.1}}, "num_heads: must be positive, at most 65535");
  refuse("VisionAttention", {{"num_heads", 2.5}, {"scale", 0.1}}, "num_heads: expected a 32-bit integer");
  refuse("VisionAttention", {{"num_heads", 16}, {"scale", -0.1}}, "scale: must be positive, got -0.1");
  refuse("VisionAttention", {{"num_heads", 16}, {"scale", HUGE_VAL}}, "scale: expected a finite number");
  refuse("VisionAttention", {{"num_heads", 16}, {"scale", 0.1}, {"compute_type", 7}},
         "compute_type: expected 1 (float32), 10 (float16)");
  const auto no_epsilon = driver::create("QKNormMRope", {{"num_heads", 4}, {"num_kv_heads", 2}, {"head_dim", 64}});
  check(!no_epsilon->output_shapes(qk_norm_mrope(DataType::kHALF, true, 2, 3, 4, 2, 64).in).has_value(),
        "QKNormMRope: norms without epsilon are refused");
  check(stand_in::take_log().find("epsilon: missing") != std::string::npos,
        "QKNormMRope: says that epsilon is missing");
}

// Each input with a size that contradicts the others or the attributes, as constants: refused when shapes are asked
// for, when configured (where the version can refuse) and, if nobody listened, when launched.
void check_refused_sizes() {
  const DataType t = DataType::kHALF;
  const std::vector<Sound> nodes = {add_rms_norm(t, t, &t, 6, 64),
                                    qk_norm_mrope(t, true, 2, 3, 4, 2, 64),
                                    tree_attention(t, {2, 3, 3, 4, 16, 160, 4, 2, 64}),
                                    tree_attention(t, {2, 3, 3, 4, 16, 160, 4, 2, 64}, DataType::kBOOL, true),
                                    pick_rows(t, 3, 5, 2, 64),
                                    linear(t, 6, 64, 96),
                                    byte_linear("LinearFp8", 6, 256, 96, 96, 1),
                                    byte_linear("LinearInt8", 6, 256, 256, 2, 2),
                                    linear_int4(6, 256, 96, 64, true),
                                    fused_moe(t, 6, 8, 2, 64, 48),
                                    fused_moe_fp8(6, 8, 2, 256, 128, false),
                                    fused_moe_fp8(6, 8, 2, 256, 128, true),
                                    fused_moe_int4(6, 8, 2, 256, 128, 64, false),
                                    fused_moe_int4(6, 8, 2, 256, 128, 64, true),
                                    gated_delta(t, {2, 3, 5, 2, 4, 16, 12, 4}),
                                    silu_mul(t, 6, 64),
                                    vision_attention(t, 20, 2, 2, 72)};
  for (const Sound& s : nodes) {
    for (size_t i = 0; i < s.in.size(); ++i) {
      for (size_t axis = 0; axis < s.in[i].sizes.size(); ++axis) {
        // what may be any size: pages per row; M; frames; n of x is only bound by the residual's, which is tried too
        const bool free_size = (s.op == "TreeAttention" && ((i == 7 && axis == 1) || (i == 8 && axis == 2))) ||
                               (s.op == "VisionAttention" && i == 4) ||
                               (s.op == "GatedDelta" && i == 11 && axis == 2);
        const bool late = (s.op == "QKNormMRope" && ((i == 0 && axis == 0) || (i == 1 && axis > 0))) ||  // n = B * S
                          (s.op == "Linear" && axis == 0) || s.op == "SiluMul" ||  // another y follows from it
                          (s.op.find("Linear") == 0 && i == 0 && axis == 0);
        if (free_size || (s.op == "PickRows" && axis == 1)) continue;  // R and H; the output's shape follows
        Sound wrong = s;
        wrong.in[i].sizes[axis] += s.op == "TreeAttention" && i == 3 && axis == 0 ? 1 : 16;
        const std::string what =
            label(s, "input " + std::to_string(i) + " with another size on axis " + std::to_string(axis));
        auto plugin = driver::create(s.op, s.fields);
        if (!late) {
          check(!plugin->output_shapes(wrong.in).has_value(), what + " has no output shapes");
          check(stand_in::take_log().find(s.op + ": ") != std::string::npos, what + ": a reason");
        }
        auto loaded = driver::deserialize(s.op, plugin->serialize());
        for (const bool listens : {true, false}) {
          if (listens) loaded->change_shapes(wrong.in, wrong.out);
          if (!listens) loaded->change_shapes(s.in, s.out);
          stand_in::take_log();
          const std::vector<const void*> in(wrong.in.size(), reinterpret_cast<const void*>(1 << 20));
          std::vector<void*> out(wrong.out.size(), reinterpret_cast<void*>(1 << 20));  // the caches' own memory
          out[0] = reinterpret_cast<void*>(1 << 21);
          check(loaded->enqueue(wrong.in, wrong.out, in, out, reinterpret_cast<void*>(1 << 22), nullptr) != 0,
                what + " is not launched");
          check(stand_in::take_log().find(s.op + ": ") != std::string::npos, what + ": a reason at the launch");
        }
      }
    }
    auto plugin = driver::create(s.op, s.fields);
    const std::vector<const void*> nulls(s.in.size(), nullptr);
    const std::vector<void*> out(s.out.size(), reinterpret_cast<void*>(1 << 21));
    check(plugin->enqueue(s.in, s.out, nulls, out, nullptr, nullptr) != 0, label(s, "not configured: not launched"));
    check(stand_in::take_log().find("not configured") != std::string::npos, label(s, "not configured: says so"));
    check(plugin->configure(s.in, s.out), label(s, "is configured"));
    plugin = driver::deserialize(s.op, plugin->serialize());  // knows its inputs from the record
    check(plugin->enqueue(s.in, s.out, nulls, out, nullptr, nullptr) != 0, label(s, "null inputs are not launched"));
    const std::string log = stand_in::take_log();
    check(log.find("data is null") != std::string::npos, label(s, "null inputs: says so, got: " + log));
  }
}

void check_odd_width() {
  Sound s = silu_mul(DataType::kHALF, 6, 64);
  s.in[0].sizes[1] = 129;
  check(!driver::create(s.op, s.fields)->output_shapes(s.in).has_value(), "SiluMul: an odd width has no halves");
  const std::string log = stand_in::take_log();
  check(log.find("expected an even width, got 129") != std::string::npos, "SiluMul: says so, got: " + log);
}

void check_odd_vision() {
  const Sound sound = vision_attention(DataType::kHALF, 20, 2, 2, 72);
  const auto refuse = [&](size_t input, std::vector<int64_t> sizes, const std::string& said) {
    Sound s = sound;
    s.in[input].sizes = std::move(sizes);
    check(!driver::create(s.op, s.fields)->output_shapes(s.in).has_value(), "VisionAttention: is refused: " + said);
    const std::string log = stand_in::take_log();
    check(log.find(said) != std::string::npos, "VisionAttention: says \"" + said + "\", got: " + log);
  };
  refuse(0, {20, 433}, "head_dim a multiple of 4 and at most 128, got 433 with num_heads = 2");
  refuse(0, {20, 0}, "head_dim a multiple of 4 and at most 128, got 0");
  refuse(0, {20, 6 * 66}, "head_dim a multiple of 4 and at most 128, got 396");
  refuse(0, {20, 6 * 132}, "head_dim a multiple of 4 and at most 128, got 792");
  refuse(0, {20, 2, 216}, "qkv: expected 2 axes, got 3");
  refuse(1, {3, 20}, "rope_positions: axis 0: expected row and column = 2, got 3");
  refuse(1, {2, 21}, "rope_positions: axis 1: expected patches of qkv = 20, got 21");
  refuse(2, {72}, "inv_freq: axis 0: expected head_dim / 2 = 36, got 72");
  refuse(3, {35}, "pair_axis: axis 0: expected head_dim / 2 = 36, got 35");
  refuse(4, {1}, "frame_starts: expected F + 1 bounds of at least one frame, got 1");
}

// What docs/tensorrt.md promises: three planes of core matrices (8 patches by 8 channels, 128 bytes), and no scores.
void check_vision_workspace() {
  const auto bytes_of = [](DataType t, int64_t patches, int64_t frames, int32_t dim) {
    const Sound s = vision_attention(t, patches, frames, 2, dim);
    return driver::create(s.op, s.fields)->workspace_bytes(s.in, s.out);
  };
  const auto promised = [](int64_t patches, int64_t frames, int64_t dim) {
    return static_cast<size_t>(3 * 2 * ((patches + 7) / 8 + frames) * (dim / 8 + 1) * 128);
  };
  const DataType half = DataType::kHALF;
  check(bytes_of(half, -1, -1, 72) == promised(640, 17, 72), "VisionAttention: room for the largest profile");
  for (const int64_t patches : {1, 8, 9, 1024}) {
    for (const int64_t frames : {1, 5, 200}) {
      const std::string what =
          "VisionAttention: room for " + std::to_string(patches) + " patches of " + std::to_string(frames) + " frames";
      check(bytes_of(half, patches, frames, 64) == promised(patches, frames, 64), what + ", D=64");
      check(bytes_of(half, patches, frames, 72) == promised(patches, frames, 72), what + ", D=72");
      check(bytes_of(half, patches, frames, 128) == promised(patches, frames, 128), what + ", D=128");
    }
  }
  check(bytes_of(half, 1024, 4, 44) == 0, "VisionAttention: a head_dim without tensor cores takes no workspace");
  check(bytes_of(DataType::kFLOAT, 1024, 4, 72) == 0, "VisionAttention: float32 takes no workspace");
  const Sound s = vision_attention(half, 20, 2, 2, 72);
  auto plugin = driver::deserialize(s.op, driver::create(s.op, s.fields)->serialize());
  plugin->change_shapes(s.in, s.out);
  const std::vector<const void*> in(s.in.size(), reinterpret_cast<const void*>(1 << 20));
  check(plugin->enqueue(s.in, s.out, in, {reinterpret_cast<void*>(1 << 21)}, nullptr, nullptr) != 0,
        "VisionAttention: is not launched without its workspace");
  const std::string log = stand_in::take_log();
  check(log.find("VisionAttention: TensorRT gave no workspace") != std::string::npos,
        "VisionAttention: says that it has no workspace, got: " + log);
}

void check_workspace() {
  const DataType t = DataType::kHALF;
  Sound s = tree_attention(t, {-1, -1, -1, -1, 16, -1, 4, 2, 64});
  const auto plugin = driver::create(s.op, s.fields);
  const size_t with_bool = plugin->workspace_bytes(s.in, s.out);
  s.in[8].type = DataType::kINT32;
  const size_t with_int = plugin->workspace_bytes(s.in, s.out);
  check(with_bool >= 256 + 4 * 16 * 4, "TreeAttention: room for safe lengths and pages");
  check(with_int == with_bool + 4 * 16 * 16, "TreeAttention: room for the mask of the largest profile");
  const Sound product = linear(t, -1, 64, 96);
  const size_t bytes = driver::create(product.op, product.fields)->workspace_bytes(product.in, product.out);
  check(bytes == 4u << 20 || bytes == 32u << 20, "Linear: room for cuBLAS");
  for (const Sound& packed : {byte_linear("LinearFp8", -1, 256, 96, 96, 1), linear_int4(-1, 256, 96, 64, true)}) {
    const size_t with_weight = driver::create(packed.op, packed.fields)->workspace_bytes(packed.in, packed.out);
    check(with_weight == bytes + 256 * 96 * 2, packed.op + ": room for cuBLAS and the dequantised weight");
  }
}

}  // namespace

void run_host_cases() {
  check_creators();
  for (const Sound& s : sound_nodes()) {
    check_life(s);
    check_types(s);
  }
  check_free_types();
  check_refused_attributes();
  check_refused_sizes();
  check_odd_width();
  check_odd_vision();
  check_workspace();
  check_vision_workspace();
}

}  // namespace cases
