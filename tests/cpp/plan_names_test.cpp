// The kernel and variant that a plan's text names are a request: Options with them give the same
// plan. The text names every launch.
#include <string>

#include "check.h"
#include "random_problem.h"

using namespace dlattn;
using namespace test;

namespace {

// The name behind "kernel: " in a plan's text.
std::string named_in(const std::string& text) {
  const std::string before = "kernel: ";
  const std::size_t begin = text.find(before) + before.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

void names_are_requests() {
  int planned = 0, with_variant = 0, of_several = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    f.options.batch_invariant = random.chance(25);
    f.options.kernel = core::kAuto, f.options.variant = nullptr;
    if (f.options.split_size == 0 && !f.options.batch_invariant && random.chance(15))
      f.options.num_splits = 1 + static_cast<int>(random.below(9));
    set_alignment(random, &f.params);
    const AttentionParams p = random_problem(random, f, random.chance(50));
    Plan plan;
    if (!core::find_plan(p, f.device, f.options, &plan)) continue;
    const std::string text = describe(plan), name = named_in(text);
    const std::size_t colon = name.find(':');
    const std::string kernel = name.substr(0, colon);
    const std::string variant = colon == std::string::npos ? "" : name.substr(colon + 1);
    Options named = f.options;
    named.kernel = kernel;
    if (!variant.empty()) named.variant = variant.c_str();
    const std::string what = "seed " + std::to_string(seed) + ": " + name + " on " + f.device.name +
                             ": " + describe_problem(p);
    const std::vector<std::string> reasons = core::refusals(p, f.device, named);
    CHECK_FOR(reasons.empty(), what + ": " + (reasons.empty() ? "" : reasons[0]));
    Plan same;
    if (!core::find_plan(p, f.device, named, &same)) continue;
    CHECK_FOR(describe(same) == text, what + "\n" + text + "but by name\n" + describe(same));
    CHECK_FOR(same.num_launches() == plan.num_launches() && same.variant == plan.variant, what);
    for (int i = 0; i < plan.num_launches(); ++i) {
      const Launch& launch = plan.launch(i);
      CHECK_FOR(&launch == &plan || text.find(": " + describe(launch) + "\n") != std::string::npos,
                what + "\n" + text);
      of_several += i > 0;
    }
    ++planned, with_variant += !variant.empty();
  }
  CHECK(planned > 2000);
  CHECK(with_variant > 1000);
  CHECK(of_several > 200);
}

}  // namespace

int main() {
  names_are_requests();
  return test::summary();
}
