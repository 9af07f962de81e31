#pragma once

#include "dlattn/attention.h"

namespace test {

// A made-up GPU. An SM has 1 KB of shared memory more than a block may have.
inline dlattn::DeviceInfo gpu(const char* name, int major, int minor, int num_sms,
                              std::int64_t smem_per_block) {
  dlattn::DeviceInfo device;
  device.type = dlattn::DeviceType::kCuda;
  device.name = name;
  device.compute_major = major;
  device.compute_minor = minor;
  device.num_sms = num_sms;
  device.max_smem_per_block = smem_per_block;
  device.smem_per_sm = smem_per_block + 1024;
  device.code = 10 * major + minor;
  device.arch_specific_code = device.code == 90;
  return device;
}

}  // namespace test
