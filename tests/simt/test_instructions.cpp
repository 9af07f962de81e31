// The models of Hopper's instructions against the same expectations as the GPU (tests/gpu).
#include "../gpu/instructions_wgmma.h"
#include "harness/launch.h"

namespace {

struct Model {
  template <typename T>
  T* allocate(std::int64_t count) {
    memory.emplace_back(new unsigned char[count * sizeof(T) + 16]);
    auto address = reinterpret_cast<std::uintptr_t>(memory.back().get());
    return reinterpret_cast<T*>((address + 15) / 16 * 16);
  }

  template <typename Kernel>
  void launch(const Kernel& kernel) {
    for (const simt::Schedule schedule : {0, 1, 3}) {
      simt::launch({dim3(1), dim3(Kernel::kThreads), static_cast<std::size_t>(kernel.smem_bytes()),
                    schedule},
                   [&] { kernel(); });
    }
  }

  void encode(dlattn::ptx::TensorMap* map, const dlattn::test::TestTensor& t) {
    simt::TensorMap model{};
    model.address = reinterpret_cast<unsigned char*>(t.data);
    model.rank = t.rank;
    model.element_bytes = 2;
    model.swizzle = static_cast<std::uint8_t>(t.swizzle);
    for (int i = 0; i < t.rank; ++i) {
      model.sizes[i] = static_cast<std::uint32_t>(t.sizes[i]);
      model.strides[i] = t.stride(i) * 2;
      model.box[i] = static_cast<std::uint16_t>(t.box[i]);
    }
    std::memcpy(map->encoded, &model, sizeof model);
  }

  std::vector<std::unique_ptr<unsigned char[]>> memory;
};

}  // namespace

int main(int argc, char** argv) {
  Model model;
  return dlattn::test::test_instructions(model, argc > 1 ? argv[1] : "");
}
