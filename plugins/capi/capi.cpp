#include "arguments.h"

namespace trt_eagle3 {
namespace {

thread_local std::string last_error;

te3_status finish(const Check& check) {
  if (!check.ok()) last_error = check.message();
  return check.status();
}

}  // namespace
}  // namespace trt_eagle3

using trt_eagle3::Check;

int32_t te3_abi_version(void) { return TE3_ABI_VERSION; }

const char* te3_last_error(void) { return trt_eagle3::last_error.c_str(); }

te3_status te3_tree_attention_workspace(const te3_tree_attention_args* args, size_t* bytes) {
  Check check("tree_attention_workspace");
  check.that(args != nullptr && bytes != nullptr, "args and bytes must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const auto params = trt_eagle3::tree_params(*args, &check);
  check.on_device({});
  if (check.ok()) check.launched(trt_eagle3::tree_attention_workspace(params, bytes));
  return trt_eagle3::finish(check);
}

te3_status te3_tree_attention(const te3_tree_attention_args* args, void* workspace, size_t workspace_bytes,
                              void* stream) {
  Check check("tree_attention");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const te3_tree_attention_args& a = *args;
  const auto params = trt_eagle3::tree_params(a, &check);
  check.on_device({a.q.data, a.k.data, a.v.data, a.k_cache.data, a.v_cache.data, a.past_lengths.data,
                   a.query_lengths.data, a.page_table.data, a.tree_mask.data, a.out.data, workspace});
  size_t wanted = 0;
  if (check.ok()) check.launched(trt_eagle3::tree_attention_workspace(params, &wanted));
  check.workspace(workspace, workspace_bytes, wanted);
  if (check.ok()) {
    const auto s = static_cast<cudaStream_t>(stream);
    check.launched(trt_eagle3::tree_attention(params, workspace, workspace_bytes, s));
  }
  return trt_eagle3::finish(check);
}

te3_status te3_qk_norm_mrope(const te3_qk_norm_mrope_args* args, void* stream) {
  Check check("qk_norm_mrope");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const te3_qk_norm_mrope_args& a = *args;
  const auto params = trt_eagle3::rope_params(a, &check);
  check.on_device({a.qkv.data, a.position_ids.data, a.inv_freq.data, a.pair_axis.data, a.q_norm.data, a.k_norm.data,
                   a.q.data, a.k.data, a.v.data});
  if (check.ok()) check.launched(trt_eagle3::qk_norm_mrope(params, static_cast<cudaStream_t>(stream)));
  return trt_eagle3::finish(check);
}

te3_status te3_add_rms_norm(const te3_add_rms_norm_args* args, void* stream) {
  Check check("add_rms_norm");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const te3_add_rms_norm_args& a = *args;
  const auto params = trt_eagle3::norm_params(a, &check);
  check.on_device({a.x.data, a.residual.data, a.weight.data, a.y.data, a.sum.data});
  if (check.ok()) check.launched(trt_eagle3::add_rms_norm(params, static_cast<cudaStream_t>(stream)));
  return trt_eagle3::finish(check);
}

te3_status te3_add_layer_norm(const te3_add_layer_norm_args* args, void* stream) {
  Check check("add_layer_norm");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const te3_add_layer_norm_args& a = *args;
  const auto params = trt_eagle3::layer_norm_params(a, &check);
  check.on_device({a.x.data, a.residual.data, a.weight.data, a.bias.data, a.y.data, a.sum.data});
  if (check.ok()) check.launched(trt_eagle3::add_layer_norm(params, static_cast<cudaStream_t>(stream)));
  return trt_eagle3::finish(check);
}

te3_status te3_silu_mul(const te3_silu_mul_args* args, void* stream) {
  Check check("silu_mul");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const auto params = trt_eagle3::silu_params(*args, &check);
  check.on_device({args->gate_up.data, args->out.data});
  if (check.ok()) check.launched(trt_eagle3::silu_mul(params, static_cast<cudaStream_t>(stream)));
  return trt_eagle3::finish(check);
}

te3_status te3_linear(const te3_linear_args* args, void* stream) {
  Check check("linear");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const auto params = trt_eagle3::linear_params(*args, &check);
  check.on_device({args->x.data, args->weight.data, args->y.data});
  if (check.ok()) check.launched(trt_eagle3::linear(params, static_cast<cudaStream_t>(stream)));
  return trt_eagle3::finish(check);
}

te3_status te3_vision_attention_workspace(const te3_vision_attention_args* args, size_t* bytes) {
  Check check("vision_attention_workspace");
  check.that(args != nullptr && bytes != nullptr, "args and bytes must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const auto params = trt_eagle3::vision_params(*args, &check);
  if (check.ok()) check.launched(trt_eagle3::vision_attention_workspace(params, bytes));
  return trt_eagle3::finish(check);
}

te3_status te3_vision_attention(const te3_vision_attention_args* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
  Check check("vision_attention");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const te3_vision_attention_args& a = *args;
  const auto params = trt_eagle3::vision_params(a, &check);
  check.on_device({a.qkv.data, a.rope_positions.data, a.inv_freq.data, a.pair_axis.data, a.frame_starts.data,
                   a.out.data, workspace});
  size_t wanted = 0;
  if (check.ok()) check.launched(trt_eagle3::vision_attention_workspace(params, &wanted));
  check.workspace(workspace, workspace_bytes, wanted);
  if (check.ok()) {
    const auto s = static_cast<cudaStream_t>(stream);
    check.launched(trt_eagle3::vision_attention(params, workspace, workspace_bytes, s));
  }
  return trt_eagle3::finish(check);
}

te3_status te3_kv_move(const te3_kv_move_args* args, void* stream) {
  Check check("kv_move");
  check.that(args != nullptr, "args must not be null");
  if (!check.ok()) return trt_eagle3::finish(check);
  const te3_kv_move_args& a = *args;
  const auto params = trt_eagle3::move_params(a, &check);
  check.on_device({a.cache.data, a.source.data, a.destination.data, a.page_table.data});
  if (check.ok()) check.launched(trt_eagle3::kv_move(params, static_cast<cudaStream_t>(stream)));
  return trt_eagle3::finish(check);
}
