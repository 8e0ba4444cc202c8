// GatedDelta: a convolution, the gated delta rule and a gated norm over states with an entry per sequence. The state
// outputs are the state inputs' memory; where they are not, the states are copied first. Types: T of activations,
// weights and windows; float32 of matrices, kept rows and gates.
#include <algorithm>

#include "tensors.h"
#include "tree_inputs.h"

namespace trt_eagle3 {
namespace {

enum { kNumKHeads, kNumVHeads, kEpsilon, kComputeType, kSettled };
enum {
  kQkvz,
  kBa,
  kConvWeight,
  kALog,
  kDtBias,
  kNorm,
  kConvState,
  kDeltaState,
  kStateReads,
  kStateWrites,
  kCertain,
  kTreeMask,
};
enum { kOut, kConvStateOut, kDeltaStateOut, kConvRows, kDeltaRows };

constexpr int32_t kTreeRows = 64;  // of which what brings states further is kept

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The pieces of the workspace, in this order: the kernel's, entries and counts for a builder's timing, the mask.
struct Layout {
  size_t entries, mask, total;

  Layout(size_t kernel_bytes, int64_t batch, int64_t num_new, int64_t tail, bool converts_mask)
      : entries(aligned(kernel_bytes)),
        mask(entries + aligned(3 * batch * sizeof(int32_t))),
        total(mask + (converts_mask ? aligned(batch * num_new * tail) : 0)) {}
};

int64_t times(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a * b; }
int64_t plus(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a + b; }
int64_t before(int64_t taps) { return taps == kUnknown ? kUnknown : taps - 1; }

class GatedDelta final : public Description {
 public:
  GatedDelta()
      : Description("GatedDelta",
                    {{"num_k_heads", false, true},
                     {"num_v_heads", false, true},
                     {"epsilon", true, true},
                     {"compute_type", false, false},
                     {"prefetch_safe", false, false}},
                    {{"qkvz", 2},
                     {"ba", 2},
                     {"conv_weight", 3},
                     {"a_log", 1},
                     {"dt_bias", 1},
                     {"norm", 1},
                     {"conv_state", 3},
                     {"delta_state", 4},
                     {"state_reads", 1},
                     {"state_writes", 1},
                     {"certain", 1},
                     {"tree_mask", 3}},
                    {{"out", 2},
                     {"conv_state_out", 3},
                     {"delta_state_out", 4},
                     {"conv_rows", 3},
                     {"delta_rows", 3}}) {}

  std::string refuse_values(const Values& v) const override {
    for (const int i : {kNumKHeads, kNumVHeads}) {
      if (v[i].integer > 0) continue;
      return std::string(attributes[i].name) + ": must be positive, got " + std::to_string(v[i].integer);
    }
    if (v[kNumVHeads].integer % v[kNumKHeads].integer != 0) {
      return "num_v_heads: must be a multiple of num_k_heads = " + std::to_string(v[kNumKHeads].integer) + ", got " +
             std::to_string(v[kNumVHeads].integer);
    }
    if (!(v[kEpsilon].real >= 0.0f)) return "epsilon: must not be negative, got " + std::to_string(v[kEpsilon].real);
    return refuse_type(v[kComputeType], "compute_type");
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const override {
    const DataType type = types[position];
    if (position >= num_inputs) return type == output_type(position - num_inputs, types);
    switch (position) {
      case kQkvz:
        return accepts_type(v[kComputeType], type);
      case kALog:
      case kDtBias:
      case kDeltaState:
        return type == DataType::kFLOAT;
      case kStateReads:
      case kStateWrites:
      case kCertain:
        return type == DataType::kINT32;
      case kTreeMask:
        return type == DataType::kBOOL || type == DataType::kINT32;
      default:
        return type == types[kQkvz];
    }
  }

  DataType output_type(int32_t output, const DataType* in) const override {
    return output == kDeltaStateOut || output == kDeltaRows ? DataType::kFLOAT : in[kQkvz];
  }

  std::string refuse_shapes(const Values& v, const std::vector<Shape>& in) const override {
    const int64_t key_heads = v[kNumKHeads].integer, value_heads = v[kNumVHeads].integer;
    const int64_t key_dim = in[kDeltaState].size[2], value_dim = in[kDeltaState].size[3];
    for (const auto& [size, axis] : {std::pair(key_dim, 2), std::pair(value_dim, 3)}) {
      if (size == kUnknown || (size > 0 && size <= 128 && size % 4 == 0)) continue;
      return "delta_state: axis " + std::to_string(axis) + ": expected a multiple of 4, at most 128, got " +
             std::to_string(size);
    }
    const int64_t taps = in[kConvWeight].size[2];
    if (taps != kUnknown && (taps < 2 || taps > 8)) {
      return "conv_weight: axis 2: expected 2 to 8, got " + std::to_string(taps);
    }
    const int64_t values = times(value_heads, value_dim);
    const int64_t channels = plus(times(2 * key_heads, key_dim), values);
    const int64_t batch = in[kTreeMask].size[0], rows = times(batch, in[kTreeMask].size[1]);
    std::string reason = refuse_size("delta_state", in[kDeltaState], 1, value_heads, "num_v_heads");
    const auto expect = [&](int input, int32_t axis, int64_t size, const char* meaning) {
      if (reason.empty()) reason = refuse_size(inputs[input].name, in[input], axis, size, meaning);
    };
    expect(kConvState, 0, in[kDeltaState].size[0], "delta_state's entries");
    expect(kConvState, 1, before(taps), "W - 1 of conv_weight");
    expect(kConvState, 2, channels, "C");
    expect(kConvWeight, 0, channels, "C");
    expect(kConvWeight, 1, 1, "one");
    expect(kQkvz, 0, rows, "B * S of tree_mask");
    expect(kQkvz, 1, plus(channels, values), "C + num_v_heads * Dv");
    expect(kBa, 0, rows, "B * S of tree_mask");
    expect(kBa, 1, 2 * value_heads, "2 * num_v_heads");
    expect(kALog, 0, value_heads, "num_v_heads");
    expect(kDtBias, 0, value_heads, "num_v_heads");
    expect(kNorm, 0, value_dim, "Dv");
    for (const int input : {kStateReads, kStateWrites, kCertain}) expect(input, 0, batch, "B of tree_mask");
    return reason;
  }

  nvinfer1::DimsExprs output_shape(const Values& v, int32_t output, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder& builder) const override {
    if (aliased_input(output) >= 0) return in[aliased_input(output)];
    using Operation = nvinfer1::DimensionOperation;
    const auto by_heads = [&](int32_t heads, int32_t axis) {
      return builder.operation(Operation::kPROD, *builder.constant(heads), *in[kDeltaState].d[axis]);
    };
    const auto* values = by_heads(v[kNumVHeads].integer, 3);
    nvinfer1::DimsExprs shape = {};
    if (output == kOut) {
      shape.nbDims = 2;
      shape.d[0] = in[kQkvz].d[0];
      shape.d[1] = values;
      return shape;
    }
    shape.nbDims = 3;
    shape.d[0] = in[kTreeMask].d[0];
    shape.d[1] = builder.operation(Operation::kMIN, *in[kTreeMask].d[1], *builder.constant(kTreeRows));
    shape.d[2] = in[kConvState].d[2];
    if (output == kDeltaRows) {
      const auto* both = builder.operation(Operation::kSUM, *by_heads(v[kNumKHeads].integer, 2), *values);
      shape.d[2] = builder.operation(Operation::kSUM, *both, *builder.constant(2 * v[kNumVHeads].integer));
    }
    return shape;
  }

  int32_t aliased_input(int32_t output) const override {
    return output == kConvStateOut ? kConvState : output == kDeltaStateOut ? kDeltaState : -1;
  }

  size_t workspace_bytes(const Values& v, size_t, const std::vector<Shape>& in, const DataType* types) const override {
    const Shape& mask = in[kTreeMask];
    GatedDeltaParams p = {};
    p.batch = static_cast<int32_t>(mask.size[0]);
    p.num_new = static_cast<int32_t>(mask.size[1]);
    p.num_k_heads = v[kNumKHeads].integer;
    p.num_v_heads = v[kNumVHeads].integer;
    p.key_dim = static_cast<int32_t>(in[kDeltaState].size[2]);
    p.value_dim = static_cast<int32_t>(in[kDeltaState].size[3]);
    p.taps = static_cast<int32_t>(in[kConvWeight].size[2]);
    p.dtype = types[kQkvz] == DataType::kFLOAT ? DType::kFloat32 : DType::kFloat16;
    size_t kernel_bytes = 0;
    if (gated_delta_workspace(p, &kernel_bytes) != cudaSuccess) cudaGetLastError();
    const bool converts = types[kTreeMask] == DataType::kINT32;
    return Layout(kernel_bytes, mask.size[0], mask.size[1], mask.size[2], converts).total;
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_gated_delta_args args = {};
    args.qkvz = input_of(call, kQkvz);
    args.ba = input_of(call, kBa);
    args.conv_weight = input_of(call, kConvWeight);
    args.a_log = input_of(call, kALog);
    args.dt_bias = input_of(call, kDtBias);
    args.norm = input_of(call, kNorm);
    args.conv_state = output_of(call, kConvStateOut);
    args.delta_state = output_of(call, kDeltaStateOut);
    args.state_reads = input_of(call, kStateReads);
    args.state_writes = input_of(call, kStateWrites);
    args.certain = input_of(call, kCertain);
    args.tree_mask = input_of(call, kTreeMask);
    args.out = output_of(call, kOut);
    args.conv_rows = output_of(call, kConvRows);
    args.delta_rows = output_of(call, kDeltaRows);
    args.num_k_heads = v[kNumKHeads].integer;
    args.num_v_heads = v[kNumVHeads].integer;
    args.epsilon = v[kEpsilon].real;
    const bool in_place =
        call.in[kConvState] == call.out[kConvStateOut] && call.in[kDeltaState] == call.out[kDeltaStateOut];
    // As TreeAttention's: who made the engine has seen that nothing of these is copied right before this launch.
    args.prefetch_safe = v[kSettled].integer != 0 && !call.building && in_place;
    Check check(name);
    const bool converts = args.tree_mask.dtype == TE3_INT32;
    if (converts) args.tree_mask.dtype = TE3_BOOL;
    for (const auto& [input, state] :
         {std::pair(kConvState, &args.conv_state), std::pair(kDeltaState, &args.delta_state)}) {
      const te3_tensor old = input_of(call, input);
      check.that(old.rank == state->rank && std::equal(old.shape, old.shape + old.rank, state->shape),
                 std::string(inputs[input].name) + ": expected its output's shape");
    }
    GatedDeltaParams params = gated_delta_params(args, &check);
    size_t kernel_bytes = 0;
    if (check.ok()) check.launched(gated_delta_workspace(params, &kernel_bytes));
    const bool replaces = converts || call.building;
    check.that((!replaces && kernel_bytes == 0) || call.workspace != nullptr, "TensorRT gave no workspace");
    if (check.ok()) check.launched(keep_states(call));
    if (check.ok() && replaces) check.launched(replace_inputs(call, args, converts, kernel_bytes, &params));
    if (check.ok()) check.launched(gated_delta(params, call.workspace, kernel_bytes, call.stream));
    return check.message();
  }

 private:
  // The states as they came in stand where they go out.
  static cudaError_t keep_states(const Call& call) {
    for (const int32_t output : {kConvStateOut, kDeltaStateOut}) {
      const int32_t input = output == kConvStateOut ? kConvState : kDeltaState;
      if (call.in[input] == call.out[output]) continue;
      const te3_tensor state = input_of(call, input);
      size_t bytes = state.dtype == TE3_FLOAT32 ? 4 : 2;
      for (int32_t axis = 0; axis < state.rank; ++axis) bytes *= static_cast<size_t>(state.shape[axis]);
      const cudaError_t error =
          cudaMemcpyAsync(call.out[output], call.in[input], bytes, cudaMemcpyDeviceToDevice, call.stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  // A builder times on entries of any content: it is given entry 0 and no rows that stay.
  static cudaError_t replace_inputs(const Call& call, const te3_gated_delta_args& args, bool converts,
                                    size_t kernel_bytes, GatedDeltaParams* p) {
    const Layout layout(kernel_bytes, p->batch, p->num_new, p->tail, converts);
    char* const workspace = static_cast<char*>(call.workspace);
    if (call.building) {
      auto* const zeros = reinterpret_cast<int32_t*>(workspace + layout.entries);
      const cudaError_t error = cudaMemsetAsync(zeros, 0, 3 * p->batch * sizeof(int32_t), call.stream);
      if (error != cudaSuccess) return error;
      p->state_reads = zeros;
      p->state_writes = zeros + p->batch;
      p->certain = zeros + 2 * p->batch;
    }
    if (!converts) return cudaSuccess;
    TreeInputs in = {};
    in.batch = p->batch;
    in.num_new = p->num_new;
    in.tail = p->tail;
    in.mask = static_cast<const int32_t*>(args.tree_mask.data);
    in.bool_mask = reinterpret_cast<uint8_t*>(workspace + layout.mask);
    p->tree_mask = in.bool_mask;
    return make_tree_inputs(in, call.stream);
  }
};

}  // namespace

const Description& gated_delta_description() {
  static const GatedDelta description;
  return description;
}

}  // namespace trt_eagle3
