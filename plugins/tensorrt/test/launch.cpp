#include "launch.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cases {
namespace {

size_t size_of(DataType type) { return type == DataType::kBOOL ? 1 : type == DataType::kHALF ? 2 : 4; }

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

}  // namespace

int64_t count_of(const Tensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.sizes) count *= size;
  return count;
}

double rounded(double x, DataType type) {
  if (type == DataType::kHALF) return __half2float(__float2half(static_cast<float>(x)));
  return static_cast<float>(x);
}

Host normal(const Tensor& tensor, double scale) {
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

double e4m3(int byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const double value = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return byte >= 128 ? -value : value;
}

Host words_of(const std::vector<unsigned char>& bytes) {
  Host host;
  for (size_t i = 0; i < bytes.size(); i += 4) {
    int32_t word;
    std::memcpy(&word, &bytes[i], sizeof word);
    host.values.push_back(word);
  }
  return host;
}

void Device::put(const Host& host, DataType type) {
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

Host Device::take(const Tensor& tensor) const {
  std::vector<char> bytes(count_of(tensor) * size_of(tensor.type));
  cudaMemcpy(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost);
  Host host;
  for (int64_t i = 0; i < count_of(tensor); ++i) {
    const char* const at = bytes.data() + i * size_of(tensor.type);
    if (tensor.type == DataType::kHALF) {
      __half value;
      std::memcpy(&value, at, 2);
      host.values.push_back(__half2float(value));
    } else if (tensor.type == DataType::kINT32) {
      int32_t value;
      std::memcpy(&value, at, 4);
      host.values.push_back(value);
    } else {
      float value;
      std::memcpy(&value, at, 4);
      host.values.push_back(value);
    }
  }
  return host;
}

std::vector<Host> launch(const Sound& s, const std::vector<Host>& in, const Mode& mode) {
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
    const int32_t input = mode.shares_caches ? aliased_input(s, i) : -1;
    out_pointers.push_back(input >= 0 ? inputs[input]->get() : outputs.back()->get());
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
    results.push_back((shares ? inputs[aliased_input(s, i)] : outputs[i])->take(s.out[i]));
  }
  return results;
}

double distance(const Host& got, const Host& wanted) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < wanted.values.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  return std::sqrt(error / std::max(norm, 1e-300));
}

void compare(const std::string& what, const std::vector<Host>& got, size_t output, const Host& wanted,
             double tolerance) {
  if (output >= got.size()) return;  // the launch failed, and said so
  const double d = distance(got[output], wanted);
  check(d <= tolerance, what + ", output " + std::to_string(output) + ": distance " + std::to_string(d));
}

}  // namespace cases
