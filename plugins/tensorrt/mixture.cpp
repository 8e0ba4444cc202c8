#include "mixture.h"

namespace trt_eagle3 {
namespace {

constexpr int32_t kMaxTopK = 16;  // what the kernels take
constexpr int64_t kMaxExperts = 512;

std::vector<Attribute> attributes_with(std::vector<Attribute> more) {
  std::vector<Attribute> all = {{"top_k", false, true}, {"renormalise", false, true}, {"compute_type", false, false}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<Port> inputs_with(std::vector<Port> weights) {
  std::vector<Port> all = {{"x", 2}, {"router_logits", 2}};
  all.insert(all.end(), weights.begin(), weights.end());
  return all;
}

struct Multiple {
  int64_t size, by;
  std::string tensor;
};

}  // namespace

Mixture::Mixture(const char* name, std::vector<Attribute> more, std::vector<Port> weights, ExpertForm form)
    : Description(name, attributes_with(std::move(more)), inputs_with(std::move(weights)), {{"y", 2}}), form_(form) {}

std::string Mixture::refuse_values(const Values& v) const {
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

bool Mixture::accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const {
  const DataType type = types[position];
  if (position == kX) return type != DataType::kFLOAT && accepts_type(v[kComputeType], type);
  const bool constant = position >= kGateUp && position < num_inputs;
  return type == (constant ? stored_type(position, types[kX]) : types[kX]);
}

std::string Mixture::refuse_shapes(const Values& v, const std::vector<Shape>& in) const {
  const int64_t hidden = in[kX].size[1], experts = in[kGateUp].size[0], width = width_of(in);
  if (experts != kUnknown && (experts < v[kTopK].integer || experts > kMaxExperts)) {
    return "gate_up: axis 0: expected top_k = " + std::to_string(v[kTopK].integer) + " to " +
           std::to_string(kMaxExperts) + " experts, got " + std::to_string(experts);
  }
  for (const auto& [size, by, tensor] : {Multiple{hidden, form_.hidden_by, "x: axis 1"},
                                         Multiple{width, form_.width_by, "down: axis 2: I"}}) {
    if (size == kUnknown || size % by == 0) continue;
    return tensor + ": expected a multiple of " + std::to_string(by) + ", got " + std::to_string(size);
  }
  std::string reason;
  const auto expect = [&](int32_t input, int32_t axis, int64_t size, const char* meaning) {
    if (reason.empty()) reason = refuse_size(inputs[input].name, in[input], axis, size, meaning);
  };
  expect(kRouterLogits, 0, in[kX].size[0], "n of x");
  expect(kRouterLogits, 1, experts, "E of gate_up");
  expect(kGateUp, 1, width == kUnknown ? kUnknown : 2 * width, "2 * I of down");
  expect(kGateUp, 2, hidden == kUnknown ? kUnknown : hidden / form_.codes, form_.codes == 1 ? "H of x" : "H of x / codes");
  expect(form_.down, 0, experts, "E of gate_up");
  expect(form_.down, 1, hidden, "H of x");
  return reason.empty() ? refuse_scales(in, hidden, width) : reason;
}

}  // namespace trt_eagle3
