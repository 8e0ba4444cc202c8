#include "dense_layer.cuh"

namespace trt_eagle3 {
namespace {

// What both formats' params have.
template <typename Params>
LayerTask layer_task(const Params& p) {
  LayerTask task = {};
  task.x = p.x;
  task.residual = p.residual;
  task.norms[0] = p.norm;
  task.norms[1] = p.next_norm;
  task.middle = p.middle;
  task.inner = p.inner;
  task.total = p.total;
  task.y = p.y;
  task.barrier = reinterpret_cast<uint32_t*>(p.barrier);
  task.epsilon = p.epsilon;
  task.weight_offset = p.weight_offset;
  task.num_rows = p.num_rows;
  task.hidden = p.hidden;
  task.width = p.width;
  task.num_stages = p.next_norm == nullptr ? kLayerStages - 1 : kLayerStages;
  return task;
}

template <template <typename> typename Weight, typename Params>
cudaError_t run(const LayerTask& task, const Params& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0) return cudaSuccess;
  const bool safe = p.prefetch_safe != 0;
  if (p.dtype == DType::kFloat16) return launch_dense_layer<Weight<__half>>(task, p.slots, safe, stream);
  return launch_dense_layer<Weight<__nv_bfloat16>>(task, p.slots, safe, stream);
}

template <typename Element>
using Int4Of128 = Int4Weight<Element, 1>;

}  // namespace

cudaError_t dense_layer_int4(const DenseLayerInt4Params& p, cudaStream_t stream) {
  LayerTask task = layer_task(p);
  const auto weight = [&](const int32_t* data, const void* scale, const void* zero, int inner, int outer) {
    return PackedWeight{reinterpret_cast<const char*>(data), scale, static_cast<const uint8_t*>(zero), inner, outer,
                        inner / kPackedSpan, 0, p.scale_dtype == DType::kBFloat16};
  };
  task.weights[kLayerO] = weight(p.o, p.o_scale, p.o_zero_point, p.attended, p.hidden);
  task.weights[kLayerGateUp] = weight(p.gate_up, p.gate_up_scale, p.gate_up_zero_point, p.hidden, 2 * p.width);
  task.weights[kLayerDown] = weight(p.down, p.down_scale, p.down_zero_point, p.width, p.hidden);
  task.weights[kLayerQkv] = weight(p.qkv, p.qkv_scale, p.qkv_zero_point, p.hidden, p.next_width);
  return run<Int4Of128>(task, p, stream);
}

cudaError_t dense_layer_fp8(const DenseLayerFp8Params& p, cudaStream_t stream) {
  LayerTask task = layer_task(p);
  // Row n of a weight has the scales of row n >> shift.
  const auto weight = [](const void* data, const float* scale, int inner, int outer, int rows, int columns) {
    const int shift = rows == outer ? 0 : rows == 1 ? 31 : 7;
    return PackedWeight{static_cast<const char*>(data), scale, nullptr, inner, outer, columns, shift, 0};
  };
  task.weights[kLayerO] = weight(p.o, p.o_scale, p.attended, p.hidden, p.o_scale_rows, p.o_scale_columns);
  task.weights[kLayerGateUp] = weight(p.gate_up, p.gate_up_scale, p.hidden, 2 * p.width, p.gate_up_scale_rows,
                                      p.gate_up_scale_columns);
  task.weights[kLayerDown] = weight(p.down, p.down_scale, p.width, p.hidden, p.down_scale_rows, p.down_scale_columns);
  task.weights[kLayerQkv] = weight(p.qkv, p.qkv_scale, p.hidden, p.next_width, p.qkv_scale_rows, p.qkv_scale_columns);
  return run<Fp8Weight>(task, p, stream);
}

}  // namespace trt_eagle3
