// Launches of a plugin as a runtime makes them, and what they are compared with; needs a GPU.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <random>

#include "cases.h"

namespace cases {

// One rounding of the output to 11 or 24 bits, and a few inside; for attention the weights are rounded to 11 bits too.
// As tests/plugins of the Python suite.
constexpr double kHalfTolerance = 4e-4, kFloatTolerance = 1e-6, kHalfAttentionTolerance = 5e-4,
                 kFloatAttentionTolerance = 2e-6, kFloatProductTolerance = 4e-6;  // 2048 products added in a row

inline std::mt19937 generator(7);

// A tensor's values on the host, as doubles that its type holds exactly.
struct Host {
  std::vector<double> values;

  double& operator[](size_t i) { return values[i]; }
  double operator[](size_t i) const { return values[i]; }
};

int64_t count_of(const Tensor& tensor);
double rounded(double x, DataType type);  // to what the type holds
Host normal(const Tensor& tensor, double scale = 1.0);
Host integers(const Tensor& tensor, int low, int high);
double e4m3(int byte);
Host words_of(const std::vector<unsigned char>& bytes);  // four in an int32, lowest first

// A quantised weight in the order of kernels/packed_weight.cuh: what its nodes hold, and its values [N, K].
struct PackedHost {
  std::vector<Host> constants;  // codes, scales and, where there are any, zero points
  std::vector<double> values;
};

PackedHost draw_bytes(bool fp8, int64_t outer, int64_t inner, int64_t scale_rows, int64_t scale_columns);
PackedHost draw_int4(int64_t outer, int64_t inner, int64_t group, bool zeros);

class Device {
 public:
  explicit Device(size_t bytes, int poison = 0xEE) {
    if (cudaMalloc(&data_, std::max<size_t>(bytes, 16)) != cudaSuccess) std::abort();
    cudaMemset(data_, poison, bytes);
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  void* get() const { return data_; }

  void put(const Host& host, DataType type);
  Host take(const Tensor& tensor) const;

 private:
  void* data_ = nullptr;
};

// How a launch is made.
struct Mode {
  bool shares_caches = true;  // one memory for a cache input and its output
  bool building = false;      // by the plugin of the network instead of the loaded one
  bool captured = false;      // in a CUDA graph, replayed twice
  bool no_scratch = false;    // an engine from a GPU whose attention took no scratch
};

// Runs a node on `in`; the outputs, or none if the launch failed. Checks that nothing is written past the workspace.
std::vector<Host> launch(const Sound& s, const std::vector<Host>& in, const Mode& mode = {});

// Relative L2 distance; infinite if anything is not a number.
double distance(const Host& got, const Host& wanted);
// Checks an output, if the launch got as far.
void compare(const std::string& what, const std::vector<Host>& got, size_t output, const Host& wanted,
             double tolerance);

void run_delta_cases();                   // GatedDelta's
void run_moe_cases();                     // FusedMoe's, FusedMoeFp8's and FusedMoeInt4's
void run_packed_cases(bool with_cublas);  // LinearFp8's, LinearInt8's and LinearInt4's
void run_tree_cases();                    // TreeAttention's
void run_vision_cases();                  // VisionAttention's

}  // namespace cases
