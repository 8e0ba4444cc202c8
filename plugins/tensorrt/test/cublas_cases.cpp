// Linear through cuBLAS, on the host: found at run time, called as BLAS defines it, or missed with a reason.
#include <dlfcn.h>

#include <cmath>
#include <random>

#include "cases.h"

namespace cases {
namespace {

// Launches a float32 product on host memory; what is wrong with it, "" if nothing.
std::string multiply(driver::Plugin& plugin, int64_t rows, int64_t inner, int64_t outer) {
  const Sound s = linear(DataType::kFLOAT, rows, inner, outer);
  std::mt19937 generator(static_cast<unsigned>(rows * 1000 + outer));
  std::normal_distribution<float> draw;
  std::vector<float> x(rows * inner), weight(outer * inner), workspace(16);
  std::vector<float> y(rows * outer, NAN);
  for (float& value : x) value = draw(generator);
  for (float& value : weight) value = draw(generator);
  if (plugin.enqueue(s.in, s.out, {x.data(), weight.data()}, {y.data()}, workspace.data(), nullptr) != 0) {
    return stand_in::take_log();
  }
  for (int64_t i = 0; i < rows * outer; ++i) {
    double wanted = 0.0;
    for (int64_t k = 0; k < inner; ++k) wanted += double{x[i / outer * inner + k]} * weight[i % outer * inner + k];
    if (!(std::abs(y[i] - wanted) <= 1e-5 * std::sqrt(inner))) {
      return "y[" + std::to_string(i) + "]: expected " + std::to_string(wanted) + ", got " + std::to_string(y[i]);
    }
  }
  return "";
}

std::unique_ptr<driver::Plugin> loaded(int64_t rows, int64_t inner, int64_t outer) {
  const Sound s = linear(DataType::kFLOAT, rows, inner, outer);
  auto made = driver::create(s.op, s.fields);
  made->output_shapes(s.in);  // and no more: configuring may ready it
  return driver::deserialize(s.op, made->serialize());
}

bool ready(driver::Plugin& plugin, int64_t rows, int64_t inner, int64_t outer) {
  const Sound s = linear(DataType::kFLOAT, rows, inner, outer);
  return plugin.change_shapes(s.in, s.out);
}

// Such a machine's own cuBLAS must not be given host memory.
bool installed() {
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"}) {
    if (dlopen(name, RTLD_NOW | RTLD_LOCAL) != nullptr) return true;
  }
  return false;
}

void check_missing() {
  const auto plugin = loaded(17, 64, 96);
  std::string said = multiply(*plugin, 17, 64, 96);
  check(said.find("none of its plugins was made ready") != std::string::npos, "Linear: no handle is made by a launch");
  check(ready(*plugin, 17, 64, 96), "Linear: a missing cuBLAS does not keep a plugin from its small products");
  said = multiply(*plugin, 17, 64, 96);
  check(said.find("no libcublas.so.13, .12 or .11. Install CUDA's cuBLAS") != std::string::npos,
        "Linear: says what is missing, got: " + said);
}

}  // namespace

void run_cublas_cases(const char* path) {
  if (!installed()) check_missing();
  std::string said;
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!check(library != nullptr, std::string("cuBLAS's stand-in is loaded: ") + path)) return;
  const auto handles = reinterpret_cast<int (*)()>(dlsym(library, "cublas_stand_in_handles"));
  const auto products = reinterpret_cast<int (*)()>(dlsym(library, "cublas_stand_in_products"));
  int wanted = 0;
  for (const int64_t rows : {1, 16, 17, 40}) {
    for (const auto& [inner, outer] : {std::pair<int64_t, int64_t>{64, 96}, {96, 64}, {31, 5}, {64, 1}}) {
      const std::string what = "Linear on the host: " + std::to_string(rows) + " rows, K " + std::to_string(inner) +
                               ", N " + std::to_string(outer);
      auto plugin = loaded(rows, inner, outer);
      check(ready(*plugin, rows, inner, outer), what + " is made ready");
      said = multiply(*plugin, rows, inner, outer);
      check(said.empty(), what + ": " + said);
      check(products() == ++wanted, what + " goes through cuBLAS once");
    }
  }
  check(handles() == 1, "Linear: all plugins of a device share one handle, got " + std::to_string(handles()));
}

}  // namespace cases
