// What FusedMoe, FusedMoeFp8 and FusedMoeInt4 share: a mixture of experts in float16 or bfloat16.
//
// More than 64 rows, as of prompts, go through the kernels at once on Hopper, and else by pieces of 64, one after the
// other.
#pragma once

#include <algorithm>

#include "tensors.h"

namespace trt_eagle3 {

// How the experts' weights are stored.
struct ExpertForm {
  int32_t down;                   // the input; gate_up is input 2
  int64_t codes;                  // numbers in an element of a weight
  int64_t hidden_by, width_by;    // H and I are multiples of these
};

class Mixture : public Description {
 public:
  std::string refuse_values(const Values& v) const override;
  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const override;
  DataType output_type(int32_t, const DataType* in) const override { return in[kX]; }
  std::string refuse_shapes(const Values& v, const std::vector<Shape>& in) const override;
  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder&) const override {
    return in[kX];
  }

 protected:
  enum { kTopK, kRenormalise, kComputeType };
  enum { kX, kRouterLogits, kGateUp };

  // `more`: attributes after those that all have.
  Mixture(const char* name, std::vector<Attribute> more, std::vector<Port> weights, ExpertForm form);

  // Type of a constant input; `x` is the type of x.
  virtual DataType stored_type(int32_t position, DataType x) const = 0;

  // What is wrong with the scales of E experts of H and I, where there are any.
  virtual std::string refuse_scales(const std::vector<Shape>&, int64_t, int64_t) const { return ""; }

  int64_t width_of(const std::vector<Shape>& in) const {
    const int64_t size = in[form_.down].size[2];
    return size == kUnknown ? kUnknown : size * form_.codes;
  }

  // Bytes of workspace for inputs no larger than these.
  template <typename Params>
  size_t bytes_of(const Values& v, const std::vector<Shape>& in, cudaError_t (*workspace)(const Params&, size_t*)) const {
    Params params = {};
    params.num_rows = static_cast<int32_t>(in[kX].size[0]);
    params.num_experts = static_cast<int32_t>(in[kGateUp].size[0]);
    params.hidden = static_cast<int32_t>(in[kX].size[1]);
    params.width = static_cast<int32_t>(width_of(in));
    params.top_k = v[kTopK].integer;
    size_t bytes = 0;
    workspace(params, &bytes);
    return bytes;
  }

  // What a launch does with the kernels of one form; `args` has the weights.
  template <typename Args, typename Params>
  std::string mix(const Values& v, const Call& call, Args args, Params (*params_of)(const Args&, Check*),
                  cudaError_t (*workspace)(const Params&, size_t*),
                  cudaError_t (*moe)(const Params&, void*, size_t, cudaStream_t)) const {
    const te3_tensor x = input_of(call, kX), logits = input_of(call, kRouterLogits), y = output_of(call, 0);
    args.top_k = v[kTopK].integer;
    args.renormalise = v[kRenormalise].integer;
    Check check(name);
    check.that(x.rank == 2 && logits.rank == 2 && y.rank == 2 && logits.shape[0] == x.shape[0] &&
                   y.shape[0] == x.shape[0] && y.shape[1] == x.shape[1],
               "x, router_logits, y: expected [n, H], [n, E] and [n, H]");
    if (!check.ok()) return check.message();
    const auto run = [&](int64_t first, int64_t rows) {
      args.x = rows_of(x, first, rows);
      args.router_logits = rows_of(logits, first, rows);
      args.y = rows_of(y, first, rows);
      const Params params = params_of(args, &check);
      check.that(call.workspace != nullptr, "TensorRT gave no workspace");
      size_t bytes = 0;  // no more than workspace_bytes() of the largest profile: it grows with the rows
      if (check.ok()) check.launched(workspace(params, &bytes));
      return check.ok() ? moe(params, call.workspace, bytes, call.stream) : cudaSuccess;
    };
    cudaError_t error = run(0, x.shape[0]);
    if (error == cudaErrorNotSupported && x.shape[0] > kPiece) {
      error = cudaSuccess;
      for (int64_t first = 0; first < x.shape[0] && error == cudaSuccess; first += kPiece) {
        error = run(first, std::min(kPiece, x.shape[0] - first));
      }
    }
    if (check.ok()) check.launched(error);
    return check.message();
  }

 private:
  static constexpr int64_t kPiece = 64;     // rows
  static constexpr int64_t kItemBytes = 2;  // of T

  // `rows` rows of a tensor from row `first` on.
  static te3_tensor rows_of(te3_tensor tensor, int64_t first, int64_t rows) {
    tensor.data = static_cast<char*>(tensor.data) + first * tensor.shape[1] * kItemBytes;
    tensor.shape[0] = rows;
    return tensor;
  }

  const ExpertForm form_;
};

}  // namespace trt_eagle3
