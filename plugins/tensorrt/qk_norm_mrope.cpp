// QKNormMRope: cuts the packed projection, normalises heads of q and k (with q_norm and k_norm), turns their pairs, or
// the first ones of them.
#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kNumHeads, kNumKVHeads, kHeadDim, kEpsilon, kComputeType, kWeightOffset };
enum { kQkv, kPositionIds, kInvFreq, kPairAxis, kQNorm, kKNorm };

class QKNormMRope final : public Description {
 public:
  QKNormMRope()
      : Description("QKNormMRope",
                    {{"num_heads", false, true},
                     {"num_kv_heads", false, true},
                     {"head_dim", false, true},
                     {"epsilon", true, false},
                     {"compute_type", false, false},
                     {"weight_offset", true, false}},
                    {{"qkv", 2}, {"position_ids", 3}, {"inv_freq", 1}, {"pair_axis", 1}, {"q_norm", 1}, {"k_norm", 1}},
                    {{"q", 2}, {"k", 2}, {"v", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    for (const int i : {kNumHeads, kNumKVHeads, kHeadDim}) {
      if (v[i].integer > 0) continue;
      return std::string(attributes[i].name) + ": must be positive, got " + std::to_string(v[i].integer);
    }
    const int32_t dim = v[kHeadDim].integer;
    if (dim % 4 != 0 || dim > 256) {
      return "head_dim: must be a multiple of 4, at most 256, got " + std::to_string(dim);
    }
    if (width(v) > INT32_MAX) return "num_heads, num_kv_heads, head_dim: too large";
    return refuse_type(v[kComputeType], "compute_type");
  }

  std::string refuse_num_inputs(const Values& v, int32_t count) const override {
    if (count != kQNorm && count != kKNorm + 1) {
      return "expected 4 inputs, or 6 with q_norm and k_norm, got " + std::to_string(count);
    }
    return count == kQNorm || v[kEpsilon].given ? "" : "epsilon: missing; q_norm and k_norm need it";
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t) const override {
    const DataType type = types[position];
    switch (position) {
      case kQkv:
        return accepts_type(v[kComputeType], type);
      case kPositionIds:
      case kPairAxis:
        return type == DataType::kINT32;
      case kInvFreq:
        return type == DataType::kFLOAT;
      default:
        return type == types[kQkv];
    }
  }

  DataType output_type(int32_t, const DataType* in) const override { return in[kQkv]; }

  std::string refuse_shapes(const Values& v, const std::vector<Shape>& in) const override {
    const int64_t dim = v[kHeadDim].integer;
    std::string reason = refuse_size("qkv", in[kQkv], 1, width(v), "(num_heads + 2 * num_kv_heads) * head_dim");
    if (reason.empty()) reason = refuse_size("position_ids", in[kPositionIds], 0, 3, "axes of the rotation");
    const int64_t pairs = in[kInvFreq].size[0];
    if (reason.empty() && pairs != kUnknown && (pairs < 1 || pairs > dim / 2)) {
      reason = "inv_freq: axis 0: expected 1 to head_dim / 2 = " + std::to_string(dim / 2) + ", got " +
               std::to_string(pairs);
    }
    if (reason.empty()) reason = refuse_size("pair_axis", in[kPairAxis], 0, pairs, "inv_freq's");
    for (size_t i = kQNorm; reason.empty() && i < in.size(); ++i) {
      reason = refuse_size(inputs[i].name, in[i], 0, dim, "head_dim");
    }
    return reason;
  }

  nvinfer1::DimsExprs output_shape(const Values& v, int32_t output, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder& builder) const override {
    nvinfer1::DimsExprs shape = in[kQkv];
    shape.d[1] = builder.constant(v[output == 0 ? kNumHeads : kNumKVHeads].integer * v[kHeadDim].integer);
    return shape;
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_qk_norm_mrope_args args = {};
    args.qkv = input_of(call, kQkv);
    args.position_ids = input_of(call, kPositionIds);
    args.inv_freq = input_of(call, kInvFreq);
    args.pair_axis = input_of(call, kPairAxis);
    if (call.num_inputs > kQNorm) {
      args.q_norm = input_of(call, kQNorm);
      args.k_norm = input_of(call, kKNorm);
    }
    args.q = output_of(call, 0);
    args.k = output_of(call, 1);
    args.v = output_of(call, 2);
    args.num_heads = v[kNumHeads].integer;
    args.num_kv_heads = v[kNumKVHeads].integer;
    args.head_dim = v[kHeadDim].integer;
    args.epsilon = v[kEpsilon].real;
    args.weight_offset = v[kWeightOffset].real;
    Check check(name);
    const QKNormMRopeParams params = qk_norm_mrope_params(args, &check);
    if (check.ok()) check.launched(qk_norm_mrope(params, call.stream));
    return check.message();
  }

 private:
  static int64_t width(const Values& v) {
    return (v[kNumHeads].integer + 2 * int64_t{v[kNumKVHeads].integer}) * v[kHeadDim].integer;
  }
};

}  // namespace

const Description& qk_norm_mrope_description() {
  static const QKNormMRope description;
  return description;
}

}  // namespace trt_eagle3
