// FusedMoe: a mixture of experts whose weights are of T. Types: T of all tensors, float16 or bfloat16.
#include "mixture.h"

namespace trt_eagle3 {
namespace {

enum { kGateUp = 2, kDown };

class FusedMoe final : public Mixture {
 public:
  FusedMoe() : Mixture("FusedMoe", {}, {{"gate_up", 3}, {"down", 3}}, {kDown, 1, 16, 8}) {}

  size_t workspace_bytes(const Values& v, size_t, const std::vector<Shape>& in, const DataType*) const override {
    return bytes_of(v, in, fused_moe_workspace);
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_fused_moe_args args = {};
    args.gate_up = input_of(call, kGateUp);
    args.down = input_of(call, kDown);
    return mix(v, call, args, fused_moe_params, fused_moe_workspace, fused_moe);
  }

 private:
  DataType stored_type(int32_t, DataType x) const override { return x; }
};

}  // namespace

const Description& fused_moe_description() {
  static const FusedMoe description;
  return description;
}

}  // namespace trt_eagle3
