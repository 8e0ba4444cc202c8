// VisionAttention: rotates q and k of every patch by its row and column, and attends from each patch over its own
// frame. The workspace holds q, k and v as the tensor cores read them: no scores, so it grows with the patches alone.
#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kNumHeads, kScale, kComputeType };
enum { kQkv, kRopePositions, kInvFreq, kPairAxis, kFrameStarts };

class VisionAttention final : public Description {
 public:
  VisionAttention()
      : Description(
            "VisionAttention", {{"num_heads", false, true}, {"scale", true, true}, {"compute_type", false, false}},
            {{"qkv", 2}, {"rope_positions", 2}, {"inv_freq", 1}, {"pair_axis", 1}, {"frame_starts", 1}}, {{"out", 2}}) {
  }

  std::string refuse_values(const Values& v) const override {
    const int32_t heads = v[kNumHeads].integer;
    if (heads <= 0 || heads > 65535) {
      return "num_heads: must be positive, at most 65535, got " + std::to_string(heads);
    }
    if (!(v[kScale].real > 0.0f)) return "scale: must be positive, got " + std::to_string(v[kScale].real);
    return refuse_type(v[kComputeType], "compute_type");
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t) const override {
    const DataType type = types[position];
    switch (position) {
      case kQkv:
        return accepts_type(v[kComputeType], type);
      case kRopePositions:
      case kPairAxis:
      case kFrameStarts:
        return type == DataType::kINT32;
      case kInvFreq:
        return type == DataType::kFLOAT;
      default:
        return type == types[kQkv];
    }
  }

  DataType output_type(int32_t, const DataType* in) const override { return in[kQkv]; }

  std::string refuse_shapes(const Values& v, const std::vector<Shape>& in) const override {
    const int64_t patches = in[kQkv].size[0], width = in[kQkv].size[1], heads = v[kNumHeads].integer;
    const int64_t dim = width == kUnknown ? kUnknown : width / (3 * heads);
    if (dim != kUnknown && (width != 3 * heads * dim || dim <= 0 || dim % 4 != 0 || dim > 128)) {
      return "qkv: axis 1: expected 3 * num_heads * head_dim, head_dim a multiple of 4 and at most 128, got " +
             std::to_string(width) + " with num_heads = " + std::to_string(heads);
    }
    const int64_t bounds = in[kFrameStarts].size[0];
    if (bounds != kUnknown && bounds < 2) {
      return "frame_starts: expected F + 1 bounds of at least one frame, got " + std::to_string(bounds);
    }
    const int64_t half = dim == kUnknown ? kUnknown : dim / 2;
    std::string reason = refuse_size("rope_positions", in[kRopePositions], 0, 2, "row and column");
    if (reason.empty()) reason = refuse_size("rope_positions", in[kRopePositions], 1, patches, "patches of qkv");
    if (reason.empty()) reason = refuse_size("inv_freq", in[kInvFreq], 0, half, "head_dim / 2");
    if (reason.empty()) reason = refuse_size("pair_axis", in[kPairAxis], 0, half, "head_dim / 2");
    return reason;
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder& builder) const override {
    nvinfer1::DimsExprs out = in[kQkv];
    out.d[1] = builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *out.d[1], *builder.constant(3));
    return out;
  }

  size_t workspace_bytes(const Values& v, size_t, const std::vector<Shape>& in, const DataType* types) const override {
    VisionAttentionParams params = {};
    params.num_patches = static_cast<int32_t>(in[kQkv].size[0]);
    params.num_frames = static_cast<int32_t>(in[kFrameStarts].size[0] - 1);
    params.num_heads = v[kNumHeads].integer;
    params.head_dim = static_cast<int32_t>(in[kQkv].size[1] / (3 * int64_t{params.num_heads}));
    params.dtype = static_cast<DType>(te3_dtype_of(types[kQkv]));
    size_t bytes = 0;
    return vision_attention_workspace(params, &bytes) == cudaSuccess ? bytes : 0;  // with 0 launch() says what lacks
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_vision_attention_args args = {};
    args.qkv = input_of(call, kQkv);
    args.rope_positions = input_of(call, kRopePositions);
    args.inv_freq = input_of(call, kInvFreq);
    args.pair_axis = input_of(call, kPairAxis);
    args.frame_starts = input_of(call, kFrameStarts);
    args.out = output_of(call, 0);
    args.num_heads = v[kNumHeads].integer;
    args.scale = v[kScale].real;
    Check check(name);
    const VisionAttentionParams params = vision_attention_params(args, &check);
    size_t wanted = 0;  // no more than workspace_bytes() of the largest profile: it grows with patches and frames
    if (check.ok()) check.launched(vision_attention_workspace(params, &wanted));
    check.that(wanted == 0 || call.workspace != nullptr, "TensorRT gave no workspace");
    if (check.ok()) check.launched(vision_attention(params, call.workspace, wanted, call.stream));
    return check.message();
  }
};

}  // namespace

const Description& vision_attention_description() {
  static const VisionAttention description;
  return description;
}

}  // namespace trt_eagle3
