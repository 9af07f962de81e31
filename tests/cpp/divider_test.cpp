// Division by multiplication against division.
#include "cuda/tile/divider.h"

#include <cstdint>
#include <random>

#include "check.h"

using dlattn::Divider;

namespace {

constexpr std::uint32_t kLast = (std::uint32_t{1} << 31) - 1;

void check(std::uint32_t divisor, std::uint32_t n) {
  const Divider divider(divisor);
  CHECK_EQ(divider.quotient(n), n / divisor);
  CHECK_EQ(divider.remainder(n), n % divisor);
}

// Where a quotient changes, and the largest numbers.
void check_edges(std::uint32_t divisor) {
  for (const std::uint64_t multiple : {0, 1, 2, 3, 1000}) {
    const std::uint64_t n = multiple * divisor;
    for (const std::uint64_t near : {n, n + 1, n + divisor - 1}) {
      if (near <= kLast) check(divisor, static_cast<std::uint32_t>(near));
    }
  }
  const std::uint32_t last = kLast / divisor * divisor;
  for (const std::uint32_t n : {last, last - 1, kLast, kLast - 1}) check(divisor, n);
}

}  // namespace

int main() {
  CHECK_EQ(Divider().divisor(), 1u);
  CHECK_EQ(Divider().quotient(kLast), kLast);
  for (std::uint32_t divisor = 1; divisor <= 2000; ++divisor) check_edges(divisor);
  for (int bits = 0; bits < 31; ++bits) {
    const std::uint32_t power = std::uint32_t{1} << bits;
    for (const std::uint32_t divisor : {power, power - 1, power + 1}) {
      if (divisor > 0) check_edges(divisor);
    }
  }
  check_edges(kLast);
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i)
    check(1 + (random() % kLast >> random() % 31), random() % (kLast + std::uint32_t{1}));
  return test::summary();
}
