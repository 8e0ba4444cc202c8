// Barriers of some of a block's warps; Hopper's in shared memory, and the bulk copies that arrive on them.
#pragma once

#include <cstdint>

namespace trt_eagle3 {

// Waits until `threads` threads of the block, whole warps, have come here or to another call with the same id (1 to
// 15), and orders their memory accesses. Warps may come from different branches, which __syncthreads() forbids; but
// not all of the block's, for synccheck takes a barrier of every thread for __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After barrier_init, before any other thread or the copy engine uses the barriers (and a __syncthreads in between).
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only when `bytes` have been copied too.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies `bytes` (a multiple of 16) of device memory; arrives on `barrier` when they are there.
__device__ __forceinline__ void copy_bulk(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies the box of a tensor map whose first element is (column, row); arrives on `barrier` when it is there.
__device__ __forceinline__ void copy_box(uint32_t destination, const void* map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::"r"(
          destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

struct BoxPlace {
  int x[5];  // the innermost dimension first
};

// The same of a tensor with five dimensions.
__device__ __forceinline__ void copy_box5(uint32_t destination, const void* map, const BoxPlace& at, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];\n" ::"r"(destination),
      "l"(map), "r"(at.x[0]), "r"(at.x[1]), "r"(at.x[2]), "r"(at.x[3]), "r"(at.x[4]), "r"(barrier)
      : "memory");
}

// Stages in shared memory that one thread fills and `kReaders` warps read, over and over: use i of the ring is of stage
// i % kStages. Behind them, full[kStages] and empty[kStages]: of each stage, whether its copies have come, and whether
// every reader has said that it has read it (an arrival each).
template <int kStages, int kStageBytes, int kReaders>
struct StageRing {
  uint32_t stages, barriers;  // addresses

  __device__ __forceinline__ uint32_t stage(int i) const { return stages + i % kStages * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int i) const { return barriers + i % kStages * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + kStages * 8; }
  static __device__ __forceinline__ int phase(int i) { return i / kStages & 1; }

  // One thread, before the others may use the barriers.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), kReaders);
    }
    barrier_init_done();
  }
  // The filling thread: stage i waits for `bytes`, once what lay there before has been read.
  __device__ __forceinline__ void start(int i, int bytes) const {
    if (i >= kStages) barrier_wait(empty(i), phase(i) ^ 1);
    barrier_expect(full(i), bytes);
  }
  // A reading warp.
  __device__ __forceinline__ void await(int i) const { barrier_wait(full(i), phase(i)); }
  __device__ __forceinline__ void release(int i) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(i));
  }
};

#endif

}  // namespace trt_eagle3
