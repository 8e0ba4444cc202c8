// PickRows: y[b R + r] = x[b S + rows[b, r]]. Types: T of x and y; rows is int32.
#include "pick_rows.h"

#include "tensors.h"

namespace trt_eagle3 {
namespace {

enum { kComputeType };
enum { kX, kRows };

class PickRows final : public Description {
 public:
  PickRows() : Description("PickRows", {{"compute_type", false, false}}, {{"x", 2}, {"rows", 2}}, {{"y", 2}}) {}

  std::string refuse_values(const Values& v) const override {
    return refuse_type(v[kComputeType], attributes[kComputeType].name);
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const override {
    const DataType type = types[position];
    if (position == kRows) return type == DataType::kINT32;
    if (position >= num_inputs) return type == types[kX];
    return accepts_type(v[kComputeType], type);
  }

  DataType output_type(int32_t, const DataType* in) const override { return in[kX]; }

  std::string refuse_shapes(const Values&, const std::vector<Shape>& in) const override {
    const int64_t tokens = in[kX].size[0], batch = in[kRows].size[0];
    if (tokens == kUnknown || batch == kUnknown || (batch > 0 && tokens > 0 && tokens % batch == 0)) return "";
    return "x: axis 0: expected a multiple of B = " + std::to_string(batch) + ", got " + std::to_string(tokens);
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder& builder) const override {
    nvinfer1::DimsExprs out = in[kX];
    out.d[0] = builder.operation(nvinfer1::DimensionOperation::kPROD, *in[kRows].d[0], *in[kRows].d[1]);
    return out;
  }

  std::string launch(const Values&, const Call& call) const override {
    const te3_tensor x = input_of(call, kX), rows = input_of(call, kRows), y = output_of(call, 0);
    Check check(name);
    check.floating("x", x);
    check.tensor("x", x, x.dtype, {kAny, kAny}, "[B * S, H]");
    check.tensor("rows", rows, TE3_INT32, {kAny, kAny}, "[B, R]");
    check.tensor("y", y, x.dtype, {rows.shape[0] * rows.shape[1], x.shape[1]}, "[B * R, H]");
    const int64_t batch = rows.shape[0];
    check.that(batch > 0 && x.shape[0] > 0 && x.shape[0] % batch == 0, [&] {
      return "x: axis 0: expected a multiple of B = " + std::to_string(batch) + ", got " + Check::text(x);
    });
    const int64_t row_bytes = x.shape[1] * (x.dtype == TE3_FLOAT32 ? 4 : 2);
    check.that(x.shape[0] <= INT32_MAX && y.shape[0] <= INT32_MAX && row_bytes <= INT32_MAX,
               "x: sizes must fit 32 bits");
    if (!check.ok()) return check.message();
    PickRowsParams params = {};
    params.x = x.data;
    params.rows = static_cast<const int32_t*>(rows.data);
    params.y = y.data;
    params.batch = static_cast<int32_t>(batch);
    params.num_rows = static_cast<int32_t>(rows.shape[1]);
    params.num_new = static_cast<int32_t>(x.shape[0] / batch);
    params.row_bytes = static_cast<int32_t>(row_bytes);
    check.launched(pick_rows(params, call.stream));
    return check.message();
  }
};

}  // namespace

const Description& pick_rows_description() {
  static const PickRows description;
  return description;
}

}  // namespace trt_eagle3
