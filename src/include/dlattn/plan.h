#pragma once

#include <cstdint>
#include <string_view>

#ifndef DLATTN_PARAMETERS_ONLY  // types.h
#include "dlattn/device.h"
#include "dlattn/support.h"
#endif
#include "dlattn/export.h"
#include "dlattn/types.h"

// How a problem is to be computed: what a caller may ask for, and what was chosen.
namespace dlattn {

struct DeviceInfo;  // device.h
struct Support;     // support.h

// Gives a call its Plan::workspace_bytes of device memory if the parameters bring none. Called at
// most once, on the caller's thread, before anything is launched. Returns memory of the problem's
// device, aligned to kWorkspaceAlignment, that stays valid until the work enqueued on the call's
// stream is done. Exceptions that it throws reach the caller.
struct WorkspaceAllocator {
  void* (*function)(void* context, std::int64_t bytes) = nullptr;  // null: none
  void* context = nullptr;
};
constexpr std::int64_t kWorkspaceAlignment = 256;  // bytes
constexpr std::int64_t kSplitAlignment = 128;      // keys; whole tiles of every kernel

struct Options {
  // One of kernel_names(). "auto" takes the family that is predicted to be the fastest. Any other
  // forces that family; if it cannot run the problem, the error says why. Not copied: the text must
  // live as long as the call.
  std::string_view kernel = "auto";
  // A variant of `kernel` by name (Launch::variant_name), "packed" or "unpacked" for whether query
  // heads are packed (Launch::packed_heads), or both joined by "+": "split+packed". The plan
  // chooses what is not named; null: both.
  const char* variant = nullptr;
  int num_threads = 0;  // CPU only; 0: DeviceInfo::num_threads
  // Choose as for one large batch of long sequences: kernel, variant, packing and parts of the keys
  // then depend on dtypes, head dims, num_heads / num_heads_kv, features, alignment and device
  // alone. A sequence gives the same bits alone, in any batch and in any varlen batch, on the same
  // device and with rows of the same alignment. Slower where the batch is small, most of all with
  // few queries. A problem beyond the limits of the kernel chosen is refused: no other one is
  // taken.
  bool batch_invariant = false;
  // Into how many parts the keys of a row are split, each computed apart and added up in their
  // order; 0: the plan decides. A part is as long as any other of its sequence, to whole tiles of
  // keys. On the CPU at most one for each tile.
  int num_splits = 0;
  // How many keys a part has, a multiple of kSplitAlignment: parts begin at its multiples, counted
  // from a sequence's first key, and are added up in their order, so that a sequence gives the same
  // bits in any batch. 0: the plan decides; with batch_invariant it takes one number whatever the
  // problem is. On the CPU one part has all keys. Not with num_splits.
  std::int64_t split_size = 0;
  Poll poll;                     // CPU only
  WorkspaceAllocator workspace;  // CUDA only
  // Whether a plan may need a workspace for speed alone. forward() makes one that needs none where
  // it is given none.
  bool allow_workspace = true;
};

// One kernel launch of a plan: which kernel, and how it cuts the problem into thread blocks.
struct Launch {
  Operation operation = Operation::kForward;
  std::string_view kernel;  // the family, "cpu" on the CPU
  DType dtype = DType::kFloat16;
  int head_dim_tile = 0;          // both head dims rounded up to the instance that serves them
  int variant = 0;                // which tile shape, or kernel for score modifications
  const char* variant_name = "";  // its name; may be ""
  int packed_heads = 1;           // query heads of a KV head that are rows of the same tiles
  // Under causality: whether row blocks are worked off longest first over all heads at once, or a
  // few heads at a time, whose keys are in L2 then.
  bool all_heads_together = false;
  int block_m = 0;              // query rows per tile
  int block_n = 0;              // keys per tile
  int num_warps = 0;            // per thread block
  int num_stages = 0;           // K/V tiles in flight
  int copy_bytes = 0;           // bytes per global-to-shared copy, by alignment: 16, 8, 4 or 2
  std::int64_t grid = 0;        // thread blocks (CUDA) or tasks (CPU)
  int cluster_size = 1;         // thread blocks of a cluster; 1: there are none
  std::int64_t smem_bytes = 0;  // dynamic shared memory per thread block
};

// How a problem will be computed: the kernel launches of a call in order, over one workspace. The
// launch that Options::kernel chooses is the Plan itself; others prepare its inputs or finish its
// results. A call enqueues these launches and no others. A plain struct: making one allocates
// nothing.
struct Plan : Launch {
  static constexpr int kMaxBefore = 2, kMaxAfter = 3;
  Launch before[kMaxBefore];
  Launch after[kMaxAfter];
  int num_before = 0;
  int num_after = 0;

  // 0 where there is nothing to compute.
  int num_launches() const { return grid == 0 ? 0 : num_before + 1 + num_after; }
  const Launch& launch(int index) const {
    if (index < num_before) return before[index];
    return index == num_before ? *this : after[index - num_before - 1];
  }

  // Parts into which the keys of a row are split, about; exactly with fixed_splits.
  int num_splits = 1;
  bool fixed_splits = false;    // as Options::num_splits asks
  std::int64_t split_size = 0;  // keys of a part, which begins at a multiple of it; 0: any
  // Bytes of device memory that the launches need beside the tensors (AttentionParams::workspace).
  // On the CPU, bytes that the call itself allocates and frees.
  std::int64_t workspace_bytes = 0;
  // Bytes at the workspace's end that backward's first launch sets to zero, and partial sums of a
  // head's slope of ALiBi that its last one adds up. On the CPU, parts of the queries that share a
  // KV head, whose sums for dk and dv are added up in order.
  std::int64_t cleared_bytes = 0;
  std::int64_t parts_per_head = 0;
  int num_threads = 0;        // CPU threads
  const char* isa = "";       // CPU instruction set
  double predicted_ns = 0.0;  // GPU time by the family's cost model, nanoseconds; 0: unknown
  // The factor of it by which kernels are compared, above 1 where the model has not been tested.
  double margin = 1.0;
};

}  // namespace dlattn
