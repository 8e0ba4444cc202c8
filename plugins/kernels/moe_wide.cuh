// FusedMoe for more rows than moe_decode.cuh takes, as of prompts: rows are gathered by expert, and go through grouped
// products.
#pragma once

#include "moe_wide_dense.cuh"
#include "moe_wide_packed.cuh"

namespace trt_eagle3 {

// Device memory of one call, all parts aligned for the copy engine.
struct MoeWorkspace {
  int32_t *experts, *places, *counts, *positions, *ends;
  float* shares;
  void *gathered, *inner;  // T [n * k, H], later down's results; T [n * k, I]
  size_t bytes;

  template <typename Params>
  static MoeWorkspace at(const Params& p, void* memory) {
    const size_t slots = static_cast<size_t>(p.num_rows) * p.top_k, counts = size_t(ceil_div(p.num_rows, 64)) * p.num_experts;
    MoeWorkspace w;
    w.bytes = 0;
    const auto take = [&](size_t bytes) {
      char* place = static_cast<char*>(memory) + w.bytes;
      w.bytes += (bytes + 127) / 128 * 128;
      return place;
    };
    w.experts = reinterpret_cast<int32_t*>(take(4 * slots));
    w.places = reinterpret_cast<int32_t*>(take(4 * slots));
    w.counts = reinterpret_cast<int32_t*>(take(4 * counts));
    w.positions = reinterpret_cast<int32_t*>(take(4 * slots));
    w.ends = reinterpret_cast<int32_t*>(take(size_t{4} * p.num_experts));
    w.shares = reinterpret_cast<float*>(take(4 * slots));
    w.gathered = take(2 * slots * p.hidden);
    w.inner = take(2 * slots * p.width);
    return w;
  }
};

// Whether the grouped products take these sizes.
template <typename Params>
bool moe_wide_supported(const Params& p, const Chip& chip) {
  return has_wgmma(chip) && p.dtype != DType::kFloat32 && p.hidden % 128 == 0 && p.width % 128 == 0;
}

// x: T [rows, K].
template <typename Format, template <typename, int> class Part>
cudaError_t run_moe_wide(const MoeWideTask& task, DType dtype, const void* x, int rows, const Chip& chip,
                         cudaStream_t stream) {
  using T = typename Format::T;
  if constexpr (Format::Bits == 16) {
    return run_moe_wide_dense<T, Part<T, DenseUnitTile::Rows>>(task, dtype, x, rows, chip, stream);
  } else {
    return run_moe_wide_packed<Format, Part>(task, dtype, x, rows, chip, stream);
  }
}

template <typename Format, typename Params>
cudaError_t launch_moe_wide(const Params& p, const ExpertWeight& gate_up, const ExpertWeight& down, void* workspace,
                            const Chip& chip, cudaStream_t stream) {
  const MoeWorkspace w = MoeWorkspace::at(p, workspace);
  const int slots = p.num_rows * p.top_k;
  const RouteRowsParams route = {p.router_logits, w.experts,     w.shares, w.places, w.counts, p.num_rows,
                                 p.num_experts,   p.top_k,       p.dtype,  p.renormalise};
  cudaError_t error = route_rows(route, stream);
  if (error != cudaSuccess) return error;
  const GatherRowsParams gather = {p.x,         w.experts, w.places,      w.counts, w.gathered, w.positions,
                                   w.ends,      p.num_rows, p.num_experts, p.hidden, p.top_k,    p.dtype};
  error = gather_rows(gather, stream);
  if (error != cudaSuccess) return error;
  const MoeWideTask up = {gate_up, w.ends, w.inner, p.num_experts, p.width};
  error = run_moe_wide<Format, GateUpPart>(up, p.dtype, w.gathered, slots, chip, stream);
  if (error != cudaSuccess) return error;
  const MoeWideTask low = {down, w.ends, w.gathered, p.num_experts, p.hidden};
  error = run_moe_wide<Format, DownPart>(low, p.dtype, w.inner, slots, chip, stream);
  if (error != cudaSuccess) return error;
  return combine_rows({w.gathered, w.positions, w.shares, p.y, p.num_rows, p.hidden, p.top_k, p.dtype}, stream);
}

}  // namespace trt_eagle3
