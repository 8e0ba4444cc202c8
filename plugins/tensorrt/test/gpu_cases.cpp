// What the plugins compute, launched by a loaded copy as a runtime does, against float64 on the host.
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "cases.h"

namespace cases {
namespace {

// One rounding of the output to 11 or 24 bits, and a few inside; for attention the weights are rounded to 11 bits too.
// As tests/plugins of the Python suite.
constexpr double kHalfTolerance = 4e-4, kFloatTolerance = 1e-6, kHalfAttentionTolerance = 5e-4,
                 kFloatAttentionTolerance = 2e-6, kFloatProductTolerance = 4e-6;  // 2048 products added in a row

std::mt19937 generator(7);

size_t size_of(DataType type) { return type == DataType::kBOOL ? 1 : type == DataType::kHALF ? 2 : 4; }

// A tensor's values on the host, as doubles that its type holds exactly.
struct Host {
  std::vector<double> values;

  double& operator[](size_t i) { return values[i]; }
  double operator[](size_t i) const { return values[i]; }
};

int64_t count_of(const Tensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.sizes) count *= size;
  return count;
}

double rounded(double x, DataType type) {
  if (type == DataType::kHALF) return __half2float(__float2half(static_cast<float>(x)));
  return static_cast<float>(x);
}

Host normal(const Tensor& tensor, double scale = 1.0) {
  std::normal_distribution<double> draw(0.0, scale);
  Host host;
  for (int64_t i = 0; i < count_of(tensor); ++i) host.values.push_back(rounded(draw(generator), tensor.type));
  return host;
}

Host integers(const Tensor& tensor, int low, int high) {
  std::uniform_int_distribution<int> draw(low, high);
  Host host;
  for (int64_t i = 0; i < count_of(tensor); ++i) host.values.push_back(draw(generator));
  return host;
}

class Device {
 public:
  explicit Device(size_t bytes, int poison = 0xEE) : bytes_(bytes) {
    if (cudaMalloc(&data_, std::max<size_t>(bytes, 16)) != cudaSuccess) std::abort();
    cudaMemset(data_, poison, bytes);
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  void* get() const { return data_; }

  void put(const Host& host, DataType type) {
    std::vector<char> bytes(host.values.size() * size_of(type));
    for (size_t i = 0; i < host.values.size(); ++i) {
      char* const at = bytes.data() + i * size_of(type);
      if (type == DataType::kHALF) {
        const __half value = __float2half(static_cast<float>(host[i]));
        std::memcpy(at, &value, 2);
      } else if (type == DataType::kFLOAT) {
        const auto value = static_cast<float>(host[i]);
        std::memcpy(at, &value, 4);
      } else if (type == DataType::kINT32) {
        const auto value = static_cast<int32_t>(host[i]);
        std::memcpy(at, &value, 4);
      } else {
        *at = host[i] != 0.0;
      }
    }
    cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  }
  Host take(const Tensor& tensor) const {
    std::vector<char> bytes(count_of(tensor) * size_of(tensor.type));
    cudaMemcpy(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost);
    Host host;
    for (int64_t i = 0; i < count_of(tensor); ++i) {
      const char* const at = bytes.data() + i * size_of(tensor.type);
      if (tensor.type == DataType::kHALF) {
        __half value;
        std::memcpy(&value, at, 2);
        host.values.push_back(__half2float(value));
      } else {
        float value;
        std::memcpy(&value, at, 4);
        host.values.push_back(value);
      }
    }
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// Relative L2 distance; infinite if anything is not a number.
double distance(const Host& got, const Host& wanted) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < wanted.values.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  return std::sqrt(error / std::max(norm, 1e-300));
}

// How a launch is made.
struct Mode {
  bool shares_caches = true;  // one memory for a cache input and its output
  bool building = false;      // by the plugin of the network instead of the loaded one
  bool captured = false;      // in a CUDA graph, replayed twice
  bool no_scratch = false;    // an engine from a GPU whose attention took no scratch
};

// A node's input types and shapes and how it is launched, for a check that fails.
std::string described(const Sound& s, const Mode& mode) {
  std::string text = s.op + (mode.building ? " while building" : "") + (mode.captured ? " captured" : "") +
                     (mode.no_scratch ? " without scratch" : "") + (mode.shares_caches ? "" : " two cache memories");
  for (const Tensor& tensor : s.in) {
    text += " " + std::to_string(static_cast<int32_t>(tensor.type)) + ":";
    for (size_t i = 0; i < tensor.sizes.size(); ++i) text += (i > 0 ? "x" : "") + std::to_string(tensor.sizes[i]);
  }
  return text;
}

// TensorRT launches nothing beyond the sizes that it asked a workspace for.
bool within_maxima(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) {
    if (tensor.max_sizes.empty()) return true;
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
      if (tensor.sizes[i] > tensor.max_sizes[i]) return false;
    }
    return true;
  });
}

// Bytes of the guard that are no longer `value`: "" for none, else where the first and the last lie.
std::string touched(const std::vector<unsigned char>& guard, unsigned char value) {
  const auto other = [value](unsigned char byte) { return byte != value; };
  const auto first = std::find_if(guard.begin(), guard.end(), other);
  if (first == guard.end()) return "";
  const auto last = std::find_if(guard.rbegin(), guard.rend(), other);
  return "bytes " + std::to_string(first - guard.begin()) + " to " + std::to_string(guard.rend() - last - 1) + " past";
}

// Runs a node on `in`; the outputs, or none if the launch failed. Checks that nothing is written past the workspace.
std::vector<Host> launch(const Sound& s, const std::vector<Host>& in, const Mode& mode = {}) {
  constexpr size_t kGuard = 1 << 16;
  constexpr unsigned char kUntouched = 0xAB;
  const std::string what = described(s, mode);
  check(within_maxima(s.all()), what + ": the case stays within its largest sizes");
  std::vector<std::unique_ptr<Device>> inputs, outputs;
  std::vector<const void*> in_pointers;
  std::vector<void*> out_pointers;
  for (size_t i = 0; i < s.in.size(); ++i) {
    inputs.push_back(std::make_unique<Device>(count_of(s.in[i]) * size_of(s.in[i].type)));
    inputs.back()->put(in[i], s.in[i].type);
    in_pointers.push_back(inputs.back()->get());
  }
  for (size_t i = 0; i < s.out.size(); ++i) {
    outputs.push_back(std::make_unique<Device>(count_of(s.out[i]) * size_of(s.out[i].type)));
    const bool shares = s.op == "TreeAttention" && i > 0 && mode.shares_caches;
    out_pointers.push_back(shares ? inputs[2 + i]->get() : outputs.back()->get());
  }
  auto plugin = driver::create(s.op, s.fields);
  plugin->output_shapes(s.in);
  plugin->configure(s.in, s.out);
  std::vector<char> record = plugin->serialize();
  if (mode.no_scratch) std::fill_n(record.begin() + 24, 8, '\0');  // node.cpp: Header::scratch_bytes
  if (!mode.building) plugin = driver::deserialize(s.op, record)->clone();
  const size_t bytes = plugin->workspace_bytes(s.in, s.out);
  Device workspace(bytes + kGuard, kUntouched);
  if (!plugin->change_shapes(s.in, s.out)) return {};
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaDeviceSynchronize();
  const auto enqueue = [&] {
    return plugin->enqueue(s.in, s.out, in_pointers, out_pointers, workspace.get(), stream) == 0;
  };
  bool sound = true;
  if (mode.captured) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);  // where an allocation or a wait would fail
    sound = enqueue();
    sound = cudaStreamEndCapture(stream, &graph) == cudaSuccess && sound;
    sound = sound && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
    for (int i = 0; sound && i < 2; ++i) sound = cudaGraphLaunch(exec, stream) == cudaSuccess;
    if (exec != nullptr) cudaGraphExecDestroy(exec);
    if (graph != nullptr) cudaGraphDestroy(graph);
  } else {
    sound = enqueue();
  }
  const cudaError_t error = cudaStreamSynchronize(stream);
  sound =
      check(sound && error == cudaSuccess, what + " runs: " + cudaGetErrorString(error) + " " + stand_in::take_log());
  cudaStreamDestroy(stream);
  std::vector<unsigned char> guard(kGuard);
  cudaMemcpy(guard.data(), static_cast<char*>(workspace.get()) + bytes, kGuard, cudaMemcpyDeviceToHost);
  const std::string past = touched(guard, kUntouched);
  check(past.empty(), what + " writes nothing past its workspace of " + std::to_string(bytes) + " bytes: " + past);
  std::vector<Host> results;
  for (size_t i = 0; sound && i < s.out.size(); ++i) {
    const bool shares = out_pointers[i] != outputs[i]->get();
    results.push_back((shares ? inputs[2 + i] : outputs[i])->take(s.out[i]));
  }
  return results;
}

void compare(const std::string& what, const std::vector<Host>& got, size_t output, const Host& wanted,
             double tolerance) {
  if (output >= got.size()) return;  // the launch failed, and said so
  const double d = distance(got[output], wanted);
  check(d <= tolerance, what + ", output " + std::to_string(output) + ": distance " + std::to_string(d));
}

void rms_norm(double* row, const Host& weight, int64_t width, double epsilon) {
  double squares = 0.0;
  for (int64_t i = 0; i < width; ++i) squares += row[i] * row[i];
  const double inverse = 1.0 / std::sqrt(squares / width + epsilon);
  for (int64_t i = 0; i < width; ++i) row[i] *= inverse * weight[i];
}

void check_add_rms_norm(DataType t, DataType x, const DataType* residual, int64_t hidden, double scale) {
  const int64_t rows = 5;
  const Sound s = add_rms_norm(t, x, residual, rows, hidden);
  std::vector<Host> in = {normal(s.in[0]), normal(s.in[1])};
  if (residual != nullptr) in.push_back(normal(s.in[2], scale));
  Host sum = in[0];
  for (size_t i = 0; residual != nullptr && i < sum.values.size(); ++i) sum[i] = rounded(sum[i] + in[2][i], *residual);
  Host y = sum;
  for (int64_t row = 0; row < rows; ++row) rms_norm(&y[row * hidden], in[1], hidden, 1e-6);
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatTolerance;
  const std::string what = "AddRmsNorm T=" + std::to_string(int(t)) + " x=" + std::to_string(int(x)) +
                           " residual=" + (residual == nullptr ? "none" : std::to_string(int(*residual))) +
                           " H=" + std::to_string(hidden);
  const auto got = launch(s, in);
  compare(what, got, 0, y, tolerance);
  compare(what, launch(s, in, {true, false, true}), 0, y, tolerance);
  if (residual != nullptr) compare(what, got, 1, sum, 0.0);
  in[1][3] += 8.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], y) > tolerance, what + ": a planted weight is noticed");
}

void check_rope(DataType t, bool norm, int32_t dim) {
  const int64_t batch = 2, seq = 7, n = batch * seq, heads = 4, heads_kv = 2, half = dim / 2;
  const Sound s = qk_norm_mrope(t, norm, batch, seq, heads, heads_kv, dim);
  std::vector<Host> in = {normal(s.in[0]), integers(s.in[1], 0, 262143), {}, integers(s.in[3], 0, 2)};
  for (int64_t i = 0; i < half; ++i) in[2].values.push_back(rounded(std::pow(5e6, -2.0 * i / dim), DataType::kFLOAT));
  for (size_t i = 4; i < s.in.size(); ++i) in.push_back(normal(s.in[i]));
  Host outs[3];
  for (int64_t token = 0; token < n; ++token) {
    for (int64_t head = 0; head < heads + 2 * heads_kv; ++head) {
      const int part = head < heads ? 0 : head < heads + heads_kv ? 1 : 2;
      std::vector<double> row(dim);
      for (int64_t i = 0; i < dim; ++i) row[i] = in[0][(token * (heads + 2 * heads_kv) + head) * dim + i];
      if (norm && part < 2) rms_norm(row.data(), in[4 + part], dim, 1e-6);
      for (int64_t i = 0; part < 2 && i < half; ++i) {
        const auto position = static_cast<float>(in[1][static_cast<int64_t>(in[3][i]) * n + token]);
        const double angle = position * static_cast<float>(in[2][i]);
        const double low = row[i], high = row[i + half];
        row[i] = low * std::cos(angle) - high * std::sin(angle);
        row[i + half] = high * std::cos(angle) + low * std::sin(angle);
      }
      outs[part].values.insert(outs[part].values.end(), row.begin(), row.end());
    }
  }
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatTolerance;
  const std::string what =
      "QKNormMRope T=" + std::to_string(int(t)) + (norm ? " with norms" : "") + " D=" + std::to_string(dim);
  for (const bool captured : {false, true}) {
    const auto got = launch(s, in, {true, false, captured});
    for (size_t i = 0; i < 3; ++i) compare(what, got, i, outs[i], i == 2 ? 0.0 : tolerance);
  }
  in[3][0] = in[3][0] == 0.0 ? 1.0 : 0.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], outs[0]) > tolerance, what + ": a planted axis is noticed");
  in[3][0] = -1000000000.0;
  in[3][1] = 1000000000.0;
  check(!launch(s, in).empty(), what + ": axes of any content do no harm");
}

struct TreeCase {
  Sound sound;
  std::vector<Host> in;
  Host out, k_cache, v_cache;
};

TreeCase make_tree(DataType t, DataType mask, const TreeSizes& z, const std::vector<int>& past) {
  TreeCase c{tree_attention(t, z, mask), {}, {}, {}, {}};
  for (int i = 0; i < 5; ++i) c.in.push_back(normal(c.sound.in[i]));
  Host pasts, queries, table;
  std::vector<int> pages(z.slots / z.page_size - 1);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int>(i) + 1;  // page 0 is nobody's
  std::shuffle(pages.begin(), pages.end(), generator);
  for (int64_t b = 0; b < z.batch; ++b) {
    pasts.values.push_back(past[b]);
    queries.values.push_back(static_cast<double>(b == 1 ? z.num_new - 1 : z.num_new));
    for (int64_t p = 0; p < z.pages_per_row; ++p) table.values.push_back(pages[b * z.pages_per_row + p]);
  }
  Host seen = integers(c.sound.in[8], 0, 1);
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t i = 0; i < z.num_new; ++i) {
      for (int64_t m = 0; m < z.tail; ++m) {
        const int64_t self = z.tail - z.num_new + i;
        double& bit = seen[(b * z.num_new + i) * z.tail + m];
        bit = m == self ? 1.0 : m > self ? 0.0 : bit;
      }
    }
  }
  c.in.insert(c.in.end(), {pasts, queries, table, seen});
  c.k_cache = c.in[3];
  c.v_cache = c.in[4];
  const int64_t kv_width = int64_t{z.heads_kv} * z.dim, group = z.heads / z.heads_kv;
  const auto slot = [&](int64_t b, int64_t place) {
    return static_cast<int64_t>(table[b * z.pages_per_row + place / z.page_size]) * z.page_size + place % z.page_size;
  };
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t i = 0; i < static_cast<int64_t>(queries[b]); ++i) {
      const int64_t to = slot(b, past[b] + z.tail - z.num_new + i) * kv_width, from = (b * z.num_new + i) * kv_width;
      for (int64_t e = 0; e < kv_width; ++e) {
        c.k_cache[to + e] = c.in[1][from + e];
        c.v_cache[to + e] = c.in[2][from + e];
      }
    }
  }
  c.out.values.assign(count_of(c.sound.out[0]), 0.0);
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t i = 0; i < static_cast<int64_t>(queries[b]); ++i) {
      for (int64_t h = 0; h < z.heads; ++h) {
        const double* q = &c.in[0][((b * z.num_new + i) * z.heads + h) * z.dim];
        double* out = &c.out[((b * z.num_new + i) * z.heads + h) * z.dim];
        double total = 0.0;
        for (int64_t place = 0; place < past[b] + z.tail; ++place) {
          if (place >= past[b] && seen[(b * z.num_new + i) * z.tail + place - past[b]] == 0.0) continue;
          const int64_t row = (slot(b, place) * z.heads_kv + h / group) * z.dim;
          double score = 0.0;
          for (int64_t e = 0; e < z.dim; ++e) score += q[e] * c.k_cache[row + e];
          const double weight = std::exp(score / 8);
          total += weight;
          for (int64_t e = 0; e < z.dim; ++e) out[e] += weight * c.v_cache[row + e];
        }
        for (int64_t e = 0; e < z.dim; ++e) out[e] /= total;
      }
    }
  }
  return c;
}

void check_tree(DataType t, DataType mask, const TreeSizes& z, const std::vector<int>& past) {
  TreeCase c = make_tree(t, mask, z, past);
  const double tolerance = t == DataType::kHALF ? kHalfAttentionTolerance : kFloatAttentionTolerance;
  const std::string what = "TreeAttention T=" + std::to_string(int(t)) + " mask=" + std::to_string(int(mask)) +
                           " S=" + std::to_string(z.num_new) + " past=" + std::to_string(past[0]);
  const std::vector<std::pair<std::string, Mode>> modes = {{" one cache memory", {true, false, false}},
                                                           {" two cache memories", {false, false, false}},
                                                           {" while building", {true, true, false}},
                                                           {" captured", {true, false, true}},
                                                           {" without scratch", {true, false, false, true}}};
  for (const auto& [name, mode] : modes) {
    const auto got = launch(c.sound, c.in, mode);
    compare(what + name, got, 0, c.out, tolerance);
    compare(what + name, got, 1, c.k_cache, 0.0);
    compare(what + name, got, 2, c.v_cache, 0.0);
  }
  TreeCase planted = c;
  std::swap(planted.in[7][0], planted.in[7][z.pages_per_row - 1]);
  const auto wrong = launch(planted.sound, planted.in);
  check(!wrong.empty() && distance(wrong[0], c.out) > tolerance, what + ": swapped pages are noticed");
  for (const int low : {-2000000000, 1000000000}) {
    for (int i = 5; i < 8; ++i) planted.in[i] = integers(planted.sound.in[i], low, low + 1000000000);
    check(!launch(planted.sound, planted.in, {true, true, false}).empty(),
          what + ": lengths and pages of any content do no harm while building");
  }
}

void check_pick_rows(DataType t, int64_t hidden) {
  const int64_t batch = 3, num_new = 7, num_rows = 4;
  const Sound s = pick_rows(t, batch, num_new, num_rows, hidden);
  std::vector<Host> in = {normal(s.in[0]), integers(s.in[1], 0, num_new - 1)};
  Host y;
  for (int64_t i = 0; i < batch * num_rows; ++i) {
    const double* row = &in[0][(i / num_rows * num_new + static_cast<int64_t>(in[1][i])) * hidden];
    y.values.insert(y.values.end(), row, row + hidden);
  }
  const std::string what = "PickRows T=" + std::to_string(int(t)) + " H=" + std::to_string(hidden);
  compare(what, launch(s, in), 0, y, 0.0);
  compare(what, launch(s, in, {true, false, true}), 0, y, 0.0);
  in[1][0] = in[1][0] == 0.0 ? 1.0 : 0.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], y) > 0.0, what + ": a planted row is noticed");
  in[1] = integers(s.in[1], -2000000000, 2000000000);
  check(!launch(s, in).empty(), what + ": rows of any content do no harm");
}

Host product(const Host& x, const Host& weight, int64_t rows, int64_t inner, int64_t outer) {
  Host y;
  for (int64_t i = 0; i < rows * outer; ++i) {
    double sum = 0.0;
    for (int64_t k = 0; k < inner; ++k) sum += x[i / outer * inner + k] * weight[i % outer * inner + k];
    y.values.push_back(sum);
  }
  return y;
}

void check_linear(DataType t, int64_t rows, int64_t inner, int64_t outer) {
  const Sound s = linear(t, rows, inner, outer);
  std::vector<Host> in = {normal(s.in[0]), normal(s.in[1])};
  const Host y = product(in[0], in[1], rows, inner, outer);
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatProductTolerance;
  const std::string what = "Linear T=" + std::to_string(int(t)) + " rows=" + std::to_string(rows) +
                           " K=" + std::to_string(inner) + " N=" + std::to_string(outer);
  compare(what, launch(s, in), 0, y, tolerance);
  compare(what + " while building", launch(s, in, {true, true, false}), 0, y, tolerance);
  compare(what + " captured", launch(s, in, {true, false, true}), 0, y, tolerance);
  in[1][(outer - 1) * inner + 3] += 64.0;
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], y) > tolerance, what + ": a planted weight is noticed");
}

// Whether cuBLAS is found: all but a few rows of float16 goes through it. Says so where it is not.
bool has_cublas() {
  const Sound s = linear(DataType::kFLOAT, 1, 32, 16);
  auto plugin = driver::create(s.op, s.fields);
  plugin->output_shapes(s.in);
  plugin->configure(s.in, s.out);
  plugin->change_shapes(s.in, s.out);
  Device x(1 << 10, 0), weight(1 << 12, 0), y(1 << 10, 0), workspace(plugin->workspace_bytes(s.in, s.out));
  const bool ran = plugin->enqueue(s.in, s.out, {x.get(), weight.get()}, {y.get()}, workspace.get(), nullptr) == 0;
  cudaDeviceSynchronize();
  const std::string log = stand_in::take_log();
  if (ran) return true;
  const bool absent = log.find("no libcublas") != std::string::npos;
  check(absent, "Linear: cuBLAS works where it is found: " + log);
  std::printf("Linear: more than 16 rows and float32 are not tested: %s", log.c_str());
  return false;
}

void check_silu_mul(DataType t, int64_t rows, int64_t width) {
  const Sound s = silu_mul(t, rows, width);
  std::vector<Host> in = {normal(s.in[0], 3.0)};
  const auto wanted = [&] {
    Host out;
    for (int64_t i = 0; i < rows * width; ++i) {
      const double* row = &in[0][i / width * 2 * width];
      out.values.push_back(row[i % width] / (1.0 + std::exp(-row[i % width])) * row[width + i % width]);
    }
    return out;
  };
  const Host out = wanted();
  const double tolerance = t == DataType::kHALF ? kHalfTolerance : kFloatTolerance;
  const std::string what =
      "SiluMul T=" + std::to_string(int(t)) + " rows=" + std::to_string(rows) + " W=" + std::to_string(width);
  compare(what, launch(s, in), 0, out, tolerance);
  compare(what, launch(s, in, {true, false, true}), 0, out, tolerance);
  for (int64_t row = 0; row < rows; ++row) {
    const auto gate = in[0].values.begin() + row * 2 * width;
    std::swap_ranges(gate, gate + width, gate + width);
  }
  const auto planted = launch(s, in);
  check(!planted.empty() && distance(planted[0], out) > tolerance, what + ": gate and up exchanged are noticed");
}

}  // namespace

bool run_gpu_cases() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    cudaGetLastError();
    std::printf("no CUDA device: launches are not tested\n");
    return false;
  }
  const DataType half = DataType::kHALF, real = DataType::kFLOAT;
  for (const int64_t hidden : {64, 111, 2048, 9000}) {
    for (const DataType t : {half, real}) {
      check_add_rms_norm(t, t, nullptr, hidden, 1.0);
      check_add_rms_norm(t, t, &t, hidden, 1.0);
    }
    check_add_rms_norm(half, real, nullptr, hidden, 1.0);
    check_add_rms_norm(half, half, &real, hidden, 3e5);  // a stream that float16 cannot hold
    check_add_rms_norm(half, real, &real, hidden, 3e5);
  }
  const bool with_cublas = has_cublas();
  for (const int64_t rows : {1, 16, 17, 40}) {
    for (const DataType t : {half, real}) {
      for (const int64_t width : {64, 111, 2048}) check_silu_mul(t, rows, width);
      if ((rows > 16 || t == real) && !with_cublas) continue;
      check_linear(t, rows, 64, 96);
      check_linear(t, rows, 2048, 1000);
      if (with_cublas) check_linear(t, rows, 40, 24);  // a K that our kernel leaves to cuBLAS
    }
  }
  for (const DataType t : {half, real}) {
    for (const int64_t hidden : {64, 111, 2048}) check_pick_rows(t, hidden);
    for (const bool norm : {false, true}) {
      for (const int32_t dim : {64, 128}) check_rope(t, norm, dim);
    }
    for (const DataType mask : {DataType::kBOOL, DataType::kINT32}) {
      check_tree(t, mask, {2, 5, 7, 4, 16, 160, 4, 2, 64}, {23, 0});
      check_tree(t, mask, {1, 1, 1, 256, 16, 4128, 16, 8, 128}, {4000});
      check_tree(t, mask, {1, 16, 16, 256, 16, 4128, 16, 8, 128}, {4000});
      check_tree(t, mask, {2, 40, 43, 64, 64, 8320, 8, 2, 64}, {2000, 4000});
    }
  }
  return true;
}

}  // namespace cases
