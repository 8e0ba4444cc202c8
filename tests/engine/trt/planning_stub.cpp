// Attention's scratch as a kernel plans it: by the multiprocessors of the chip that it is planned for.
#include "chip.cuh"
#include "params.h"

namespace trt_eagle3 {

cudaError_t tree_attention_workspace(const TreeAttentionParams&, size_t* bytes) {
  Chip chip;
  const cudaError_t error = Chip::current(&chip);
  *bytes = error == cudaSuccess ? size_t{1 << 14} * chip.sms : 0;
  return error;
}

}  // namespace trt_eagle3
