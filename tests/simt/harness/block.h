#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

// Runs the thread blocks of a launch, one after another, or those of a cluster at once, each CUDA
// thread on a fiber of its own. Threads switch at barriers and warp collectives only.
//
// The events for ThreadSanitizer (the memory model):
//   __syncthreads   orders all threads of the block.
//   barrier.cluster orders all threads of all blocks of the cluster.
//   bar.sync        orders the threads that meet at it; those that bar.arrive, before it.
//   __syncwarp      orders the lanes of its mask.
//   wgmma.wait_group orders the lanes of its warp: what one of them does after it comes after all
//                   that the warp's products read.
//   shuffles, votes, wmma loads, stores and products exchange registers and order NO memory: a
//   lane's plain store needs
//                   a __syncwarp before another lane, or a wmma load, reads it, as the CUDA guide
//                   demands.
//   griddepcontrol.wait orders what the grid ahead does before what follows.
//   launch          everything before the launch is seen by all threads; after it the host sees
//   everything. Blocks of
//                   one launch are not ordered, so two blocks that write one address are a race
//                   (unless the same thread index does it, for those share a fiber).
// The program ends, with a message, for: a barrier or collective that some thread of the block or
// lane of the mask never reaches, __syncthreads at different places of the source, a bar.sync whose
// threads disagree about their number or are not whole warps, a lane that calls a collective whose
// mask leaves it out, a wrong argument to a modelled instruction, a write outside the dynamic
// shared memory, a read of the shared memory of a block of the cluster some of whose threads have
// ended.
namespace simt {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;  // of a block, and of a cluster

// Order in which runnable threads get their turn: 0 in order, 1 reversed, any other number shuffled
// by that seed, odd ones switching between warps at every collective, even ones running a warp as
// far as it gets.
using Schedule = unsigned;

struct Launch {
  dim3 grid;
  dim3 block;
  std::size_t smem_bytes = 0;
  Schedule schedule = 0;
  // The writes of the grid ahead at its end, in a launch that may start before that; null: all
  // ahead is over.
  void (*grid_ahead)(void*) = nullptr;
  void* grid_ahead_context = nullptr;
  unsigned cluster_size = 1;  // neighbouring blocks, in a grid of one dimension
};

struct Thread {
  dim3 thread_idx;
  dim3 block_idx;
  dim3 block_dim;
  dim3 grid_dim;
  int index = 0;  // within the cluster, as is the warp's; a block of its own is one
  int warp = 0;
  int lane = 0;
};

const Thread& this_thread();
// Addresses of shared memory count from here, and not from 0, so that a forgotten base shows.
constexpr std::uint32_t kSmemBase = 1024;
unsigned char* dynamic_smem();
bool in_dynamic_smem(const void* memory, std::size_t bytes);
int num_block_threads();
// The place in another block of the cluster that is `own` in the caller's.
unsigned char* smem_of_block(const void* own, unsigned rank);
// Calls run(context) with the shared memory and the barriers of another block of the cluster in the
// place of the caller's. It must not wait.
void as_block(unsigned rank, void (*run)(void*), void* context);
int num_cluster_blocks();

void sync_threads(const char* file, int line);
void sync_cluster();
void sync_warp(unsigned mask);

// bar.sync: waits until `count` threads, whole warps, have called it with this `id`, 1 to 15.
constexpr int kNumBarriers = 16;
void sync_barrier(int id, int count);
// bar.arrive: counts as one of them and goes on.
void arrive_at_barrier(int id, int count);

// griddepcontrol.wait: what the grid ahead does is ordered before what follows. Every thread of a
// launch with one must call it, and access no global memory before.
void wait_for_grids_ahead();
bool grids_ahead_are_over();  // as far as the caller knows
void check_global_access();   // that the caller may
// griddepcontrol.launch_dependents, after the wait alone: so at most two grids overlap.
void let_next_grid_start();

// Waits until a number in global memory is at least `least`. It orders no memory: whoever waits so
// acquires afterwards.
void wait_for_counter(const unsigned* counter, unsigned least);

// mbarriers, by the address of their 8 bytes of shared memory. Arrivals release, waits acquire.
constexpr int kMaxMbarriers = 256;  // of a block, and of a cluster

void mbarrier_init(void* memory, int count);
void mbarrier_arrive(void* memory);
// An arrival that will come with asynchronous copies. Whoever waits for nothing else any more
// completes them and arrives in their place.
void mbarrier_promise(void* memory);
// Raises the number of bytes that copies must bring before the current phase can complete.
void mbarrier_expect(void* memory, std::uint32_t bytes);
// A copy that will bring so many of them. Whoever waits for nothing else any more completes it.
void mbarrier_start_bytes(void* memory, std::uint32_t bytes);
void mbarrier_complete_bytes(void* memory);  // all that are on their way
// Orders what the caller has done before whoever waits for the current phase.
void mbarrier_release(void* memory);
// Waits until the phase of this parity is complete, or all that it lacks is promised: whether it is
// the latter.
bool mbarrier_wait(void* memory, int parity);
// Orders what the caller has completed itself since before what follows.
void mbarrier_acquire(void* memory, int parity);
int mbarrier_number(void* memory);  // which of the block's mbarriers
// Makes the initialisation of all mbarriers so far visible to asynchronous copies.
void fence_mbarrier_init();

// The asynchronous proxy: a second view of the dynamic shared memory, which bulk copies and wgmma
// read. Bulk copies write both views; what threads store appears in it by a fence alone.
void fence_async_proxy();
const unsigned char* async_view(const void* smem);
bool same_in_async_view(const void* chunk);  // of 16 bytes; the sanitizers do not see the read
void write_async_view(void* smem, const void* from, std::size_t bytes);

constexpr int kMaxRank = 5;

// The contents of a tensor map. Fits in the 128 bytes of the opaque one.
struct TensorMap {
  unsigned char* address;
  std::int64_t strides[kMaxRank];  // in bytes; the innermost is that of an element
  std::uint32_t sizes[kMaxRank];
  std::uint16_t box[kMaxRank];
  std::uint8_t rank;
  std::uint8_t element_bytes;
  std::uint8_t swizzle;  // bytes of a row that are permuted: 128, 64, 32, or 0
};
static_assert(sizeof(TensorMap) <= 128);

// A bulk copy in flight.
struct BulkCopy {
  TensorMap map;
  unsigned char* smem;
  int coordinates[kMaxRank];
  int group;               // of a store
  std::uint64_t checksum;  // of a store's source
  // A copy between blocks of a cluster has no tensor map, but a source and its bytes.
  const unsigned char* from = nullptr;
  int bytes = 0;
};
struct BulkLoads {
  static constexpr int kMax = 64;
  BulkCopy loads[kMax];
  int count;
};
// The loads in flight whose bytes count for this mbarrier; what the caller has done is ordered
// before what the engine does.
void add_bulk_load(void* mbarrier, const BulkCopy& load);
// Has them completed by the mbarrier's TMA unit: to ThreadSanitizer a thread of its own, and
// ordered before whoever waits at the mbarrier.
void run_tma(void* mbarrier, void (*complete)(const BulkLoads& loads));

// setmaxnreg by the calling thread's warp. At the block's end the warps of each warpgroup must have
// asked for the same number, and all together for no more than the block was launched with.
void set_max_registers(int count, bool increase);

// Waits until every lane of `mask` has called the collective called `name`, then `combine` runs
// once over the lanes' operands (null for lanes outside the mask), and all go on. It orders no
// memory. `combine` must be one of those below, for they are compiled without instrumentation.
using Combine = void (*)(void* const (&operands)[kWarpSize], unsigned mask);
void warp_collective(const char* name, unsigned mask, Combine combine, void* operand);
// The same, ordering the lanes' memory as __syncwarp does.
void ordering_collective(const char* name, unsigned mask, Combine combine, void* operand);

struct Shuffle {
  std::uint64_t value;
  std::uint64_t result;
  int source;  // lane
};
void combine_shuffle(void* const (&operands)[kWarpSize], unsigned mask);

struct Vote {
  bool predicate;
  unsigned ballot;
};
void combine_vote(void* const (&operands)[kWarpSize], unsigned mask);

struct MatrixAccess {
  const void* pointer;
  unsigned leading_dimension;
  int layout;
};
void combine_matrix_access(void* const (&operands)[kWarpSize], unsigned mask);

// d = a b + c of 16 x 16 matrices. The lane's elements stand at places (row * 16 + column) that
// model/mma.h gives.
struct MatrixProduct {
  float a[16];
  float b[16];
  float c[8];
  float d[8];
  const std::uint8_t* places_a;
  const std::uint8_t* places_b;
  const std::uint8_t* places_c;
  int num_inputs;  // elements of a and of b: 8, or 16 where every element is held twice
};
void combine_matrix_product(void* const (&operands)[kWarpSize], unsigned mask);

// Every lane gets what all lanes gave.
struct Gather {
  std::uint64_t value;
  std::uint64_t all[kWarpSize];
};
void combine_gather(void* const (&operands)[kWarpSize], unsigned mask);

// d += a b of 16 x 16 and 16 x 8 matrices; who holds what is as the PTX manual has it
// (src/cuda/ptx/mma.cuh).
struct SmallProduct {
  std::uint32_t a[4];
  std::uint32_t b[2];
  float d[4];
};
void combine_half_product(void* const (&operands)[kWarpSize], unsigned mask);
void combine_bfloat16_product(void* const (&operands)[kWarpSize], unsigned mask);

// ldmatrix of four matrices of 8 x 8 elements of 16 bits: lane i gives row i % 8 of matrix i / 8,
// and gets two elements of each matrix.
struct MatrixRow {
  std::uint64_t row[2];
  std::uint32_t registers[4];
};
void combine_ldmatrix(void* const (&operands)[kWarpSize], unsigned mask);
void combine_ldmatrix_trans(void* const (&operands)[kWarpSize], unsigned mask);

// d += a b of 16 x 32 and 32 x 8 bytes, in registers as the PTX manual has it
// (src/cuda/ptx/mma8.cuh); d are the bits of fp32 or 32-bit numbers, or of pairs of fp16 ones.
struct ByteProduct {
  std::uint8_t a[16];
  std::uint8_t b[8];
  std::uint32_t d[4];
};
void combine_e4m3_product(void* const (&operands)[kWarpSize], unsigned mask);
void combine_e4m3_half_product(void* const (&operands)[kWarpSize], unsigned mask);
void combine_s8_product(void* const (&operands)[kWarpSize], unsigned mask);

// wgmma.wait_group: the products of a warp that its lanes have waited for, oldest first.
enum class WgmmaElements : std::uint8_t { kHalf, kBFloat16, kE4m3 };
struct WgmmaOperation {
  std::uint64_t descriptor_a, descriptor_b;
  std::uint32_t registers_a[4];  // where a_in_registers
  float* accumulators;           // the lane's n / 2
  int n;
  WgmmaElements elements;
  bool a_in_registers, a_mn_major, b_mn_major;
  bool accumulate;  // false: d = a b
};
struct WgmmaOperations {
  const WgmmaOperation* operations;
  int count;
};
// Checks that the warps of a warpgroup issue the same: that this warp's number `index` is this one,
// and, at a warp's end, that it has issued as many as the others.
void log_wgmma(int index, const WgmmaOperation& operation);
void end_wgmma_log(int issued);
void combine_wgmma(void* const (&operands)[kWarpSize], unsigned mask);

// 16 bytes of an operand in shared memory, a matrix of rows (M or N) of 32 bytes along K. K-major:
// chunk c holds half of row c / 2. MN-major, of 16-bit elements: 8 rows from c / 16 * 8 on of k = c
// % 16.
const unsigned char* wgmma_chunk(std::uint64_t descriptor, bool mn_major, int chunk);

[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

void run(const Launch& launch, void (*body)(void*), void* context);

}  // namespace simt
