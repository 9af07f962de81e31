// wgmma's products and operands in shared memory. Compiled without instrumentation: the scheduler
// runs the products over the registers of all lanes, which show the sanitizers what they read
// themselves.
#include <cstdlib>
#include <cstring>

#include "block.h"
#include "convert.h"
#include "e4m3_sum.h"

namespace simt {
namespace {

constexpr int kDepth = 16;  // k
constexpr int kMaxN = 256;

using Convert = float (*)(std::uint16_t);

// to[k][row] of `rows` rows, the first of them row `first_row` of the operand.
void read_operand(float (*to)[kMaxN], std::uint64_t descriptor, bool mn_major, int first_row,
                  int rows, Convert convert) {
  for (int i = 0; i < 2 * rows; ++i) {
    const int chunk = mn_major ? first_row / 8 * kDepth + i : first_row * 2 + i;
    std::uint16_t elements[8];
    std::memcpy(elements, wgmma_chunk(descriptor, mn_major, chunk), sizeof elements);
    for (int e = 0; e < 8; ++e) {
      const int k = mn_major ? i % kDepth : i % 2 * 8 + e;
      const int row = mn_major ? i / kDepth * 8 + e : i / 2;
      to[k][row] = convert(elements[e]);
    }
  }
}

// Lane l holds rows l / 4 and 8 further, columns 2 (l % 4) and the next, 8 further at every step.
int row_of(int lane, int element) {
  return lane / 4 + element / 2 % 2 * 8;
}
int column_of(int lane, int element) {
  return element / 4 * 8 + lane % 4 * 2 + element % 2;
}

// The same of e4m3, row by row.
constexpr int kByteDepth = 32;
void read_byte_operand(std::uint8_t (*to)[kByteDepth], std::uint64_t descriptor, int first_row,
                       int rows) {
  for (int i = 0; i < 2 * rows; ++i)
    std::memcpy(to[i / 2] + i % 2 * 16, wgmma_chunk(descriptor, false, 2 * first_row + i), 16);
}

void check_arguments(const WgmmaOperations* const (&lanes)[kWarpSize], int index) {
  const WgmmaOperation& first = lanes[0]->operations[index];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const WgmmaOperation& o = lanes[lane]->operations[index];
    if (o.descriptor_a != first.descriptor_a || o.descriptor_b != first.descriptor_b ||
        o.n != first.n || o.elements != first.elements || o.accumulate != first.accumulate ||
        o.a_in_registers != first.a_in_registers)
      die("the lanes of a warp give one wgmma different arguments");
  }
}

void multiply_bytes(const WgmmaOperations* const (&lanes)[kWarpSize], int index, int warp) {
  static std::uint8_t a[16][kByteDepth], b[kMaxN][kByteDepth];
  const WgmmaOperation& first = lanes[0]->operations[index];
  for (int lane = 0; lane < kWarpSize && first.a_in_registers; ++lane) {
    const WgmmaOperation& o = lanes[lane]->operations[index];
    for (int r = 0; r < 4; ++r)
      std::memcpy(a[lane / 4 + r % 2 * 8] + r / 2 * 16 + lane % 4 * 4, &o.registers_a[r], 4);
  }
  if (!first.a_in_registers) read_byte_operand(a, first.descriptor_a, warp * 16, 16);
  read_byte_operand(b, first.descriptor_b, 0, first.n);
  static E4m3Numbers rows[16], columns[kMaxN];
  for (int row = 0; row < 16; ++row) rows[row] = E4m3Numbers(a[row], kByteDepth);
  for (int n = 0; n < first.n; ++n) columns[n] = E4m3Numbers(b[n], kByteDepth);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* const d = lanes[lane]->operations[index].accumulators;
    for (int e = 0; e < first.n / 2; ++e) {
      d[e] = add_e4m3_products(first.accumulate ? d[e] : 0.0f, rows[row_of(lane, e)],
                               columns[column_of(lane, e)]);
    }
  }
}

void multiply(const WgmmaOperations* const (&lanes)[kWarpSize], int index, int warp) {
  check_arguments(lanes, index);
  if (lanes[0]->operations[index].elements == WgmmaElements::kE4m3)
    return multiply_bytes(lanes, index, warp);
  static float a[kDepth][kMaxN], b[kDepth][kMaxN], d[16][kMaxN];
  const WgmmaOperation& first = lanes[0]->operations[index];
  const Convert convert = first.elements == WgmmaElements::kBFloat16 ? from_bfloat16 : from_half;
  const int n = first.n;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const WgmmaOperation& o = lanes[lane]->operations[index];
    for (int e = 0; e < n / 2; ++e)
      d[row_of(lane, e)][column_of(lane, e)] = first.accumulate ? o.accumulators[e] : 0.0f;
    for (int e = 0; first.a_in_registers && e < 8; ++e) {
      const auto bits = static_cast<std::uint16_t>(o.registers_a[e / 2] >> (e % 2 * 16));
      a[column_of(lane, e)][row_of(lane, e)] = convert(bits);
    }
  }
  if (!first.a_in_registers)
    read_operand(a, first.descriptor_a, first.a_mn_major, warp * 16, 16, convert);
  read_operand(b, first.descriptor_b, first.b_mn_major, 0, n, convert);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      const float x = a[k][row];
      for (int block = 0; block < n; block += 8) {
        for (int column = block; column < block + 8; ++column) d[row][column] += x * b[k][column];
      }
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* to = lanes[lane]->operations[index].accumulators;
    for (int e = 0; e < n / 2; ++e) to[e] = d[row_of(lane, e)][column_of(lane, e)];
  }
}

// The operations that the warps of each warpgroup have issued.
struct Log {
  std::uint64_t* operations;
  int count, capacity;
  int warps_ended;
};
constexpr int kWarpgroup = 4;
Log logs[kMaxThreads / kWarpSize / kWarpgroup];
Log& current_log() {
  return logs[this_thread().warp / kWarpgroup];
}

std::uint64_t hash(const WgmmaOperation& o) {
  const std::uint64_t flags = static_cast<std::uint64_t>(o.n) << 8 |
                              static_cast<std::uint64_t>(o.elements) << 4 | o.a_in_registers << 3 |
                              o.a_mn_major << 2 | o.b_mn_major << 1 | o.accumulate;
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  return ((o.descriptor_a * kOdd + o.descriptor_b) * kOdd ^ flags) * kOdd;
}

}  // namespace

void log_wgmma(int index, const WgmmaOperation& operation) {
  Log& log = current_log();
  if (index == log.count) {
    if (log.warps_ended > 0) die("a wgmma that another warp of the warpgroup has not issued");
    if (log.count == log.capacity) {
      log.capacity = 2 * log.capacity + 64;
      log.operations = static_cast<std::uint64_t*>(
          std::realloc(log.operations, log.capacity * sizeof(std::uint64_t)));
    }
    log.operations[log.count++] = hash(operation);
  }
  if (log.operations[index] != hash(operation))
    die("the warps of a warpgroup issue different wgmma operations");
}

void end_wgmma_log(int issued) {
  Log& log = current_log();
  if (issued != log.count)
    die("the warps of a warpgroup issue different numbers of wgmma operations");
  const int warps = num_block_threads() / kWarpSize;
  const int first = this_thread().warp % warps / kWarpgroup * kWarpgroup;  // within its block
  const int members = warps - first < kWarpgroup ? warps - first : kWarpgroup;
  if (++log.warps_ended == members) log.count = log.warps_ended = 0;
}

const unsigned char* wgmma_chunk(std::uint64_t descriptor, bool mn_major, int chunk) {
  const auto field = [&](int bit, int bits) {
    return static_cast<std::uint32_t>(descriptor >> bit & ((1u << bits) - 1));
  };
  const std::uint32_t start = field(0, 14) << 4, leading = field(16, 14) << 4;
  const std::uint32_t stride = field(32, 14) << 4;
  if (field(14, 2) || field(30, 2) || field(46, 3) || field(52, 10))
    die("a wgmma descriptor %016llx with reserved bits",
        static_cast<unsigned long long>(descriptor));
  if (field(49, 3)) die("a wgmma descriptor with a base offset: not modelled");
  constexpr std::uint32_t kSpans[4] = {16, 128, 64, 32};  // bytes of a row of the swizzle's atom
  const std::uint32_t span = kSpans[field(62, 2)], chunks = span / 16;
  std::uint32_t at = start;
  if (mn_major) {
    const std::uint32_t k = chunk % kDepth, rows = chunk / kDepth;
    at += chunks == 1 ? rows * stride + k / 8 * leading
                      : rows % chunks * 16 + rows / chunks * leading + k / 8 * stride;
    at += k % 8 * span;
  } else {
    const std::uint32_t row = chunk / 2, half = chunk % 2;
    at += row % 8 * span + row / 8 * stride + half * (chunks == 1 ? leading : 16);
  }
  at ^= (at >> 7 & (chunks - 1)) << 4;
  const unsigned char* memory = dynamic_smem() + static_cast<std::int64_t>(at) - kSmemBase;
  if (!in_dynamic_smem(memory, 16)) die("wgmma reads beyond shared memory, at %u", at);
  return memory;
}

void combine_wgmma(void* const (&operands)[kWarpSize], unsigned) {
  const WgmmaOperations* lanes[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) lanes[i] = static_cast<const WgmmaOperations*>(operands[i]);
  for (int i = 0; i < kWarpSize; ++i) {
    if (lanes[i]->count != lanes[0]->count)
      die("the lanes of a warp wait for different wgmma operations");
  }
  for (int i = 0; i < lanes[0]->count; ++i) multiply(lanes, i, this_thread().warp % 4);
}

}  // namespace simt
