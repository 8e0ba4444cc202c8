// FusedMoe: a mixture of experts. Types: T of all tensors, float16 or bfloat16.
//
// More than 64 rows, as of prompts, go through the kernels at once on Hopper, and else by pieces of 64, one after the
// other.
#include <algorithm>

#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kTopK, kRenormalise, kComputeType };
enum { kX, kRouterLogits, kGateUp, kDown };

constexpr int64_t kRows = 64;      // of a piece
constexpr int64_t kItemBytes = 2;  // of T
constexpr int32_t kMaxTopK = 16;   // what the kernel takes
constexpr int64_t kMaxExperts = 512;

// Of workspace, for so many rows at once.
size_t bytes_of(const Values& v, int64_t rows, int64_t experts, int64_t hidden, int64_t width) {
  FusedMoeParams params = {};
  params.num_rows = static_cast<int32_t>(rows);
  params.num_experts = static_cast<int32_t>(experts);
  params.hidden = static_cast<int32_t>(hidden);
  params.width = static_cast<int32_t>(width);
  params.top_k = v[kTopK].integer;
  size_t bytes = 0;
  fused_moe_workspace(params, &bytes);
  return bytes;
}

// `rows` rows of a tensor from row `first` on.
te3_tensor rows_of(te3_tensor tensor, int64_t first, int64_t rows) {
  tensor.data = static_cast<char*>(tensor.data) + first * tensor.shape[1] * kItemBytes;
  tensor.shape[0] = rows;
  return tensor;
}

struct Multiple {
  int64_t size, by;
  const char* tensor;
};

class FusedMoe final : public Description {
 public:
  FusedMoe()
      : Description("FusedMoe", {{"top_k", false, true}, {"renormalise", false, true}, {"compute_type", false, false}},
                    {{"x", 2}, {"router_logits", 2}, {"gate_up", 3}, {"down", 3}}, {{"y", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    if (v[kTopK].integer < 1 || v[kTopK].integer > kMaxTopK) {
      return "top_k: expected 1 to " + std::to_string(kMaxTopK) + ", got " + std::to_string(v[kTopK].integer);
    }
    if (v[kRenormalise].integer != 0 && v[kRenormalise].integer != 1) {
      return "renormalise: expected 0 or 1, got " + std::to_string(v[kRenormalise].integer);
    }
    if (is_pinned(v[kComputeType]) && v[kComputeType].integer == 1) {
      return "compute_type: expected 10 (float16) or 16 (bfloat16), got 1 (float32)";
    }
    return refuse_type(v[kComputeType], "compute_type");
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t) const override {
    const DataType type = types[position];
    if (position != kX) return type == types[kX];
    return type != DataType::kFLOAT && accepts_type(v[kComputeType], type);
  }

  DataType output_type(int32_t, const DataType* in) const override { return in[kX]; }

  std::string refuse_shapes(const Values& v, const std::vector<Shape>& in) const override {
    const int64_t hidden = in[kX].size[1], experts = in[kGateUp].size[0], width = in[kDown].size[2];
    if (experts != kUnknown && (experts < v[kTopK].integer || experts > kMaxExperts)) {
      return "gate_up: axis 0: expected top_k = " + std::to_string(v[kTopK].integer) + " to " +
             std::to_string(kMaxExperts) + " experts, got " + std::to_string(experts);
    }
    for (const auto& [size, by, tensor] : {Multiple{hidden, 16, "x: axis 1"}, Multiple{width, 8, "down: axis 2"}}) {
      if (size == kUnknown || size % by == 0) continue;
      return std::string(tensor) + ": expected a multiple of " + std::to_string(by) + ", got " + std::to_string(size);
    }
    std::string reason = refuse_size("router_logits", in[kRouterLogits], 0, in[kX].size[0], "n of x");
    const auto expect = [&](int input, int32_t axis, int64_t size, const char* meaning) {
      if (reason.empty()) reason = refuse_size(inputs[input].name, in[input], axis, size, meaning);
    };
    expect(kRouterLogits, 1, experts, "E of gate_up");
    expect(kGateUp, 1, width == kUnknown ? kUnknown : 2 * width, "2 * I of down");
    expect(kGateUp, 2, hidden, "H of x");
    expect(kDown, 0, experts, "E of gate_up");
    expect(kDown, 1, hidden, "H of x");
    return reason;
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder&) const override {
    return in[kX];
  }

  size_t workspace_bytes(const Values& v, size_t, const std::vector<Shape>& in, const DataType*) const override {
    return bytes_of(v, in[kX].size[0], in[kGateUp].size[0], in[kX].size[1], in[kDown].size[2]);
  }

  std::string launch(const Values& v, const Call& call) const override {
    const te3_tensor x = input_of(call, kX), logits = input_of(call, kRouterLogits), y = output_of(call, 0);
    Check check(name);
    check.that(x.rank == 2 && logits.rank == 2 && y.rank == 2 && logits.shape[0] == x.shape[0] &&
                   y.shape[0] == x.shape[0] && y.shape[1] == x.shape[1],
               "x, router_logits, y: expected [n, H], [n, E] and [n, H]");
    if (!check.ok()) return check.message();
    cudaError_t error = run(v, call, 0, x.shape[0], &check);
    if (error == cudaErrorNotSupported && x.shape[0] > kRows) {
      error = cudaSuccess;
      for (int64_t first = 0; first < x.shape[0] && error == cudaSuccess; first += kRows) {
        error = run(v, call, first, std::min(kRows, x.shape[0] - first), &check);
      }
    }
    if (check.ok()) check.launched(error);
    return check.message();
  }

 private:
  // `rows` rows from row `first` on.
  static cudaError_t run(const Values& v, const Call& call, int64_t first, int64_t rows, Check* check) {
    te3_fused_moe_args args = {};
    args.x = rows_of(input_of(call, kX), first, rows);
    args.router_logits = rows_of(input_of(call, kRouterLogits), first, rows);
    args.gate_up = input_of(call, kGateUp);
    args.down = input_of(call, kDown);
    args.y = rows_of(output_of(call, 0), first, rows);
    args.top_k = v[kTopK].integer;
    args.renormalise = v[kRenormalise].integer;
    const FusedMoeParams params = fused_moe_params(args, check);
    check->that(call.workspace != nullptr, "TensorRT gave no workspace");
    if (!check->ok()) return cudaSuccess;
    const size_t bytes = bytes_of(v, rows, params.num_experts, params.hidden, params.width);
    return fused_moe(params, call.workspace, bytes, call.stream);
  }
};

}  // namespace

const Description& fused_moe_description() {
  static const FusedMoe description;
  return description;
}

}  // namespace trt_eagle3
