// TreeAttention: writes new keys and values into the paged cache and attends over past and masked tail. The cache
// outputs are the cache inputs' memory; where they are not, the cache is copied first. FP8 caches (kv_type) lie in
// int32, four numbers in one, as 8.6 has no FP8.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "log.h"
#include "tensors.h"
#include "tree_inputs.h"

namespace trt_eagle3 {
namespace {

enum { kNumHeads, kNumKVHeads, kPageSize, kScale, kComputeType, kSettled, kKVType, kWindow, kAnchorWindow };
enum { kQ, kK, kV, kKCache, kVCache, kPastLengths, kQueryLengths, kPageTable, kTreeMask, kKVScales };

constexpr int64_t kNumbers = 4;  // of an FP8 cache, in an int32

// kv_type is a number of onnx's TensorProto.DataType; none is T.
constexpr int32_t kOnnxFp8 = 17;
bool is_fp8(const Values& v) { return v[kKVType].integer == kOnnxFp8; }

size_t size_of(const te3_tensor& tensor) { return tensor.dtype == TE3_FLOAT32 || tensor.dtype == TE3_INT32 ? 4 : 2; }

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The pieces of the workspace, in this order: the kernel's partial sums, safe copies of lengths and pages, the mask.
struct Layout {
  size_t lengths, pages, mask, total;

  Layout(size_t scratch, int64_t batch, int64_t num_new, int64_t tail, int64_t pages_per_row, bool converts_mask)
      : lengths(aligned(scratch)),
        pages(lengths + aligned(2 * batch * sizeof(int32_t))),
        mask(pages + aligned(batch * pages_per_row * sizeof(int32_t))),
        total(mask + (converts_mask ? aligned(batch * num_new * tail) : 0)) {}
};

constexpr float kAnyScale = 1.0f;  // a cache is FP8 where it has scales; planning reads none

// The most that the kernels' partial sums take for any shapes, on this GPU. The number of splits depends on how many
// blocks there are, so the fewest rows of each kind of tile are tried with every batch; an unlimited cache splits most.
size_t most_partial_bytes(int32_t num_heads, int32_t num_kv_heads, bool fp8) {
  const int32_t group = num_heads / num_kv_heads;
  size_t most = 0;
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t num_new : {1, 16 / group + 1, 64 / group + 1, 128 / group + 1, 256}) {
      for (int32_t batch = 1; batch <= 512; ++batch) {
        TreeAttentionParams p = {};
        p.batch = batch;
        p.num_new = p.tail = num_new;
        p.page_size = 64;
        p.pages_per_row = 1 << 16;
        p.num_heads = num_heads;
        p.num_kv_heads = num_kv_heads;
        p.head_dim = head_dim;
        p.dtype = DType::kFloat16;
        p.kv_scales = fp8 ? &kAnyScale : nullptr;
        size_t bytes = 0;
        if (tree_attention_workspace(p, &bytes) != cudaSuccess) {
          cudaGetLastError();
          return most;
        }
        most = std::max(most, bytes);
      }
    }
  }
  return most;
}

class TreeAttention final : public Description {
 public:
  TreeAttention()
      : Description("TreeAttention",
                    {{"num_heads", false, true},
                     {"num_kv_heads", false, true},
                     {"page_size", false, true},
                     {"scale", true, true},
                     {"compute_type", false, false},
                     {"prefetch_safe", false, false},
                     {"kv_type", false, false},
                     {"window", false, false},
                     {"anchor_window", false, false}},
                    {{"q", 2},
                     {"k", 2},
                     {"v", 2},
                     {"k_cache", 3},
                     {"v_cache", 3},
                     {"past_lengths", 1},
                     {"query_lengths", 1},
                     {"page_table", 2},
                     {"tree_mask", 3},
                     {"kv_scales", 2}},
                    {{"out", 2}, {"k_cache_out", 3}, {"v_cache_out", 3}}) {}

  std::string refuse_values(const Values& v) const override {
    for (const int i : {kNumHeads, kNumKVHeads, kPageSize}) {
      if (v[i].integer > 0) continue;
      return std::string(attributes[i].name) + ": must be positive, got " + std::to_string(v[i].integer);
    }
    if (!(v[kScale].real > 0.0f)) return "scale: must be positive, got " + std::to_string(v[kScale].real);
    if (v[kNumHeads].integer % v[kNumKVHeads].integer != 0) {
      return "num_heads: must be a multiple of num_kv_heads = " + std::to_string(v[kNumKVHeads].integer) + ", got " +
             std::to_string(v[kNumHeads].integer);
    }
    if (v[kKVType].integer != 0 && !is_fp8(v)) {
      return "kv_type: expected 17 (float8 e4m3fn) or none, got " + std::to_string(v[kKVType].integer);
    }
    return refuse_type(v[kComputeType], "compute_type");
  }

  std::string refuse_num_inputs(const Values& v, int32_t count) const override {
    const int32_t wanted = is_fp8(v) ? kKVScales + 1 : static_cast<int32_t>(kKVScales);
    if (count == wanted) return "";
    return "expected " + std::to_string(wanted) + " inputs, got " + std::to_string(count);
  }

  bool accepts(const Values& v, int32_t position, const DataType* types, int32_t num_inputs) const override {
    const DataType type = types[position];
    if (position >= num_inputs) {
      const int32_t cache = aliased_input(position - num_inputs);
      return type == types[cache < 0 ? kQ : cache];
    }
    switch (position) {
      case kQ:
        return accepts_type(v[kComputeType], type);
      case kKCache:
      case kVCache:
        return type == (is_fp8(v) ? DataType::kINT32 : types[kQ]);
      case kKVScales:
        return type == DataType::kFLOAT;
      case kPastLengths:
      case kQueryLengths:
      case kPageTable:
        return type == DataType::kINT32;
      case kTreeMask:
        return type == DataType::kBOOL || type == DataType::kINT32;
      default:
        return type == types[kQ];
    }
  }

  DataType output_type(int32_t output, const DataType* in) const override {
    return output > 0 && in[kKCache] == DataType::kINT32 ? DataType::kINT32 : in[kQ];
  }

  std::string refuse_shapes(const Values& v, const std::vector<Shape>& in) const override {
    const int64_t heads = v[kNumHeads].integer, heads_kv = v[kNumKVHeads].integer;
    const auto times = [](int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a * b; };
    const int64_t dim = times(in[kKCache].size[2], is_fp8(v) ? kNumbers : 1);
    if (dim != kUnknown && (dim <= 0 || dim % 2 != 0 || dim > 256)) {
      return "k_cache: head_dim must be even and at most 256, got " + std::to_string(dim);
    }
    const int64_t slots = in[kKCache].size[0];
    if (slots != kUnknown && slots % v[kPageSize].integer != 0) {
      return "k_cache: its " + std::to_string(slots) +
             " slots are no multiple of page_size = " + std::to_string(v[kPageSize].integer);
    }
    const int64_t batch = in[kTreeMask].size[0], tokens = times(batch, in[kTreeMask].size[1]);
    std::string reason = refuse_size("k_cache", in[kKCache], 1, heads_kv, "num_kv_heads");
    const auto expect = [&](int input, int32_t axis, int64_t size, const char* meaning) {
      if (reason.empty()) reason = refuse_size(inputs[input].name, in[input], axis, size, meaning);
    };
    for (int32_t axis = 0; axis < 3; ++axis) expect(kVCache, axis, in[kKCache].size[axis], "k_cache's");
    expect(kQ, 1, times(heads, dim), "num_heads * head_dim");
    expect(kK, 1, times(heads_kv, dim), "num_kv_heads * head_dim");
    expect(kV, 1, times(heads_kv, dim), "num_kv_heads * head_dim");
    for (const int input : {kQ, kK, kV}) expect(input, 0, tokens, "B * S of tree_mask");
    for (const int input : {kPastLengths, kQueryLengths, kPageTable}) expect(input, 0, batch, "B of tree_mask");
    if (is_fp8(v)) {
      expect(kKVScales, 0, 2, "of keys and of values");
      expect(kKVScales, 1, heads_kv, "num_kv_heads");
    }
    return reason;
  }

  nvinfer1::DimsExprs output_shape(const Values&, int32_t output, const nvinfer1::DimsExprs* in,
                                   nvinfer1::IExprBuilder&) const override {
    return output == 0 ? in[kQ] : in[aliased_input(output)];
  }

  int32_t aliased_input(int32_t output) const override { return output == 0 ? -1 : kKCache + output - 1; }

  size_t make_scratch_bytes(const Values& v) const override {
    static std::mutex mutex;
    static std::map<std::array<int32_t, 4>, size_t> known;
    std::array<int32_t, 4> key = {0, v[kNumHeads].integer, v[kNumKVHeads].integer, v[kKVType].integer};
    if (cudaGetDevice(&key[0]) != cudaSuccess) {  // no GPU: planned for the widest chip (chip.cuh)
      cudaGetLastError();
      key[0] = -1;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    return known[key] = most_partial_bytes(key[1], key[2], is_fp8(v));
  }

  size_t workspace_bytes(const Values&, size_t scratch_bytes, const std::vector<Shape>& in,
                         const DataType* types) const override {
    const Shape& mask = in[kTreeMask];
    const bool converts = types[kTreeMask] == DataType::kINT32;
    return Layout(scratch_bytes, mask.size[0], mask.size[1], mask.size[2], in[kPageTable].size[1], converts).total;
  }

  std::string launch(const Values& v, const Call& call) const override {
    te3_tree_attention_args args = {};
    args.q = input_of(call, kQ);
    args.k = input_of(call, kK);
    args.v = input_of(call, kV);
    args.k_cache = cache_of(v, output_of(call, 1));
    args.v_cache = cache_of(v, output_of(call, 2));
    if (is_fp8(v)) args.kv_scales = input_of(call, kKVScales);
    args.past_lengths = input_of(call, kPastLengths);
    args.query_lengths = input_of(call, kQueryLengths);
    args.page_table = input_of(call, kPageTable);
    args.tree_mask = input_of(call, kTreeMask);
    args.out = output_of(call, 0);
    args.page_size = v[kPageSize].integer;
    args.scale = v[kScale].real;
    args.window = v[kWindow].integer;
    args.anchor_window = v[kAnchorWindow].integer;
    // Caches, lengths and pages are older than the engine's first launch, but a builder may put a copy of one right
    // before this launch, and nothing says here whether it did: whoever made the engine has looked, and says so by this
    // attribute. While building, and where the caches are copied below, they are not.
    args.prefetch_safe = v[kSettled].integer != 0 && !call.building && call.in[kKCache] == call.out[1] &&
                   call.in[kVCache] == call.out[2];
    Check check(name);
    if (is_fp8(v)) check.data_of("kv_scales", args.kv_scales);
    check.that(args.q.shape[1] == v[kNumHeads].integer * args.k_cache.shape[2] &&
                   args.k_cache.shape[1] == v[kNumKVHeads].integer,
               "q, k_cache: not num_heads and num_kv_heads heads");
    for (const auto& [input, cache] : {std::pair(kKCache, &args.k_cache), std::pair(kVCache, &args.v_cache)}) {
      check.shape_of(inputs[input].name, cache_of(v, input_of(call, input)), cache->dtype,
                     {cache->shape[0], cache->shape[1], cache->shape[2]}, "its output's shape");
    }
    const bool converts = args.tree_mask.dtype == TE3_INT32;
    if (converts) args.tree_mask.dtype = TE3_BOOL;
    TreeAttentionParams params = tree_attention_params(args, &check);
    size_t wanted = 0;
    if (check.ok()) check.launched(tree_attention_workspace(params, &wanted));
    if (wanted > call.scratch_bytes) params.num_splits = 1;  // another GPU than it was built on: slower, and right
    const bool replaces = converts || call.building;
    const bool needs_workspace = replaces || (wanted > 0 && params.num_splits != 1);
    check.that(!needs_workspace || call.workspace != nullptr, "TensorRT gave no workspace");
    if (check.ok()) check.launched(keep_caches(call));
    if (check.ok() && replaces) check.launched(replace_inputs(call, args, converts, &params));
    if (check.ok()) check.launched(tree_attention(params, call.workspace, call.scratch_bytes, call.stream));
    return check.message();
  }

 private:
  // A cache with its numbers for elements.
  static te3_tensor cache_of(const Values& v, te3_tensor cache) {
    if (!is_fp8(v)) return cache;
    cache.dtype = TE3_UINT8;
    cache.shape[2] *= kNumbers;
    return cache;
  }

  // The caches as they came in stand where they go out.
  static cudaError_t keep_caches(const Call& call) {
    static std::atomic<bool> told{false};
    for (int32_t output = 1; output <= 2; ++output) {
      const int32_t input = kKCache + output - 1;
      if (call.in[input] == call.out[output]) continue;
      const te3_tensor cache = input_of(call, input);
      const size_t bytes =
          static_cast<size_t>(cache.shape[0] * cache.shape[1] * cache.shape[2]) * size_of(cache);
      if (!call.building && !told.exchange(true)) {
        log(Severity::kWARNING,
            "TreeAttention: a cache output is not its input's memory, so every step copies the cache. Bind one "
            "address to both.");
      }
      const cudaError_t error =
          cudaMemcpyAsync(call.out[output], call.in[input], bytes, cudaMemcpyDeviceToDevice, call.stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  static cudaError_t replace_inputs(const Call& call, const te3_tree_attention_args& args, bool converts,
                                    TreeAttentionParams* p) {
    const Layout layout(call.scratch_bytes, p->batch, p->num_new, p->tail, p->pages_per_row, converts);
    char* const workspace = static_cast<char*>(call.workspace);
    TreeInputs in = {};
    in.past_lengths = p->past_lengths;
    in.query_lengths = p->query_lengths;
    in.page_table = p->page_table;
    in.batch = p->batch;
    in.num_new = p->num_new;
    in.tail = p->tail;
    in.pages_per_row = p->pages_per_row;
    in.page_size = p->page_size;
    in.num_pages = static_cast<int32_t>(args.k_cache.shape[0] / p->page_size);
    if (call.building) {
      in.safe_past_lengths = reinterpret_cast<int32_t*>(workspace + layout.lengths);
      in.safe_query_lengths = in.safe_past_lengths + p->batch;
      in.safe_page_table = reinterpret_cast<int32_t*>(workspace + layout.pages);
      p->past_lengths = in.safe_past_lengths;
      p->query_lengths = in.safe_query_lengths;
      p->page_table = in.safe_page_table;
    }
    if (converts) {
      in.mask = static_cast<const int32_t*>(args.tree_mask.data);
      in.bool_mask = reinterpret_cast<uint8_t*>(workspace + layout.mask);
      p->tree_mask = in.bool_mask;
    }
    return make_tree_inputs(in, call.stream);
  }
};

}  // namespace

const Description& tree_attention_description() {
  static const TreeAttention description;
  return description;
}

}  // namespace trt_eagle3
