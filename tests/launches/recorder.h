#pragma once

#include <cstdint>
#include <string>
#include <vector>

// A CUDA runtime and driver that launch nothing and record what is asked of them. Linked in place
// of CUDA's, so that the library's own launchers run without a GPU.
namespace recorder {

struct Launch {
  const void* kernel;
  void* stream;
  unsigned grid[3], block[3];
  std::size_t smem_bytes;
  unsigned cluster = 1;
  bool starts_early = false;  // before the grid ahead of it is over
  void** arguments;           // valid during `on_launch`
};

// The devices that there are: cuda:0 of compute capability 9.0, cuda:1 of 8.9, cuda:2 of 8.0.
constexpr int kNumDevices = 3;

// Since the last call of clear().
const std::vector<Launch>& launches();
void clear();

// Called for every launch, if set.
extern void (*on_launch)(const Launch& launch);

// The most dynamic shared memory that a kernel has been allowed, in bytes.
std::int64_t allowed_smem(const void* kernel);

// "dlattn::scalar::kernel<float, 64>(dlattn::AttentionParams, dlattn::LaunchShape)".
std::string name_of(const void* kernel);

}  // namespace recorder
