// Answers questions without computing anything: supported, plan, info, inspect.
#include "report.h"

#include <string>
#include <vector>

#include "attention.h"

namespace dlattn::python {

Tensor stand_in(const char* name, int number, const Shape& shape, dlpack::DLDataType dtype,
                Device device) {
  Tensor tensor;
  tensor.name = name;
  tensor.data = reinterpret_cast<void*>(unallocated(number));
  tensor.dtype = dtype;
  tensor.device = device;
  tensor.ndim = shape.ndim;
  std::int64_t stride = 1;
  for (int i = shape.ndim - 1; i >= 0; --i) {
    tensor.shape[i] = shape.sizes[i];
    tensor.strides[i] = stride;
    stride *= shape.sizes[i];
  }
  return tensor;
}

nb::tuple to_tuple(const std::vector<std::string>& lines) {
  nb::list list;
  for (const std::string& line : lines) list.append(nb::str(line.c_str()));
  return nb::tuple(list);
}

namespace {

// The problem of a call, with outputs as attention() would allocate them.
Problem planned_problem(const AttentionCall& call) {
  Problem problem = read_options(call);
  Target target = make_target(call.q, "q");
  set_stream(call.stream, &target);
  read_tensors(call, target, &problem);
  if (call.out.is_none()) {
    const dlpack::DLDataType dtype = to_dlpack(problem.params.out.dtype);
    set_out(stand_in("out", 0, problem.out, dtype, target.device), &problem);
  } else {
    set_out(import_tensor_to_write(call.out, "out", target, &problem), &problem);
  }
  if (problem.return_lse) {
    const dlpack::DLDataType dtype = to_dlpack(DType::kFloat32);
    set_lse(stand_in("lse", 1, problem.lse, dtype, target.device), &problem);
  }
  if (call.workspace.is_valid() && !call.workspace.is_none())
    read_workspace(call.workspace, target, &problem);
  return problem;
}

nb::dict device_dict(const DeviceInfo& device) {
  nb::dict fields;
  fields["index"] = device.index;
  fields["name"] = nb::str(device.name.c_str());
  fields["compute_capability"] = nb::make_tuple(device.compute_major, device.compute_minor);
  fields["num_sms"] = device.num_sms;
  fields["max_smem_per_block"] = device.max_smem_per_block;
  fields["l2_bytes"] = device.l2_bytes;
  fields["unserved"] = nb::str(device.unserved.c_str());
  fields["code"] = nb::make_tuple(device.code / 10, device.code % 10);
  fields["ptx"] = device.ptx;
  fields["arch_specific_code"] = device.arch_specific_code;
  return fields;
}

}  // namespace

nb::object supported(const AttentionCall& call) {
  return support_tuple([&] {
    const Problem problem = planned_problem(call);
    return dlattn::supported(problem.params, device_info(problem.params.device), problem.options);
  });
}

nb::object plan(const AttentionCall& call) {
  const Problem problem = planned_problem(call);
  const DeviceInfo& device = device_info(problem.params.device);
  const Plan chosen = dlattn::plan(problem.params, device, problem.options);
  return plan_fields(chosen, problem.params.device,
                     passed_over(problem.params, device, problem.options, chosen, kernel_names()));
}

nb::dict plan_fields(const Plan& chosen, Device device,
                     const std::vector<std::string>& passed_over) {
  nb::dict fields;
  fields["kernel"] = nb::str(chosen.kernel.data(), chosen.kernel.size());
  fields["variant"] = chosen.variant_name;
  fields["dtype"] = to_string(chosen.dtype);
  fields["device"] = nb::str(device_text(device).c_str());
  fields["head_dim_tile"] = chosen.head_dim_tile;
  fields["packed_heads"] = chosen.packed_heads;
  fields["block_m"] = chosen.block_m;
  fields["block_n"] = chosen.block_n;
  fields["num_warps"] = chosen.num_warps;
  fields["num_stages"] = chosen.num_stages;
  fields["copy_bytes"] = chosen.copy_bytes;
  fields["grid"] = chosen.grid;
  fields["smem_bytes"] = chosen.smem_bytes;
  std::vector<std::string> launches;
  for (int i = 0; i < chosen.num_launches(); ++i) launches.push_back(describe(chosen.launch(i)));
  fields["num_launches"] = chosen.num_launches();
  fields["launches"] = to_tuple(launches);
  fields["num_splits"] = chosen.num_splits;
  fields["split_size"] = chosen.split_size;
  fields["workspace_bytes"] = chosen.workspace_bytes;
  fields["num_threads"] = chosen.num_threads;
  fields["isa"] = chosen.isa;
  fields["predicted_ns"] = chosen.predicted_ns;
  fields["passed_over"] = to_tuple(passed_over);
  fields["text"] = nb::str(describe(chosen).c_str());
  return fields;
}

nb::object info() {
  const BuildInfo build = build_info();
  nb::dict fields;
  fields["version"] = build.version;
  fields["cuda"] = build.cuda;
  fields["cuda_version"] = build.cuda_version;
  fields["archs"] = to_tuple(build.archs);
  fields["archs_reason"] = build.archs_reason;
  fields["kernels"] = to_tuple(build.kernels);
  fields["missing_kernels"] = to_tuple(build.missing_kernels);
  nb::list devices;
  for (int i = 0; i < device_count(); ++i)
    devices.append(device_dict(device_info({DeviceType::kCuda, i})));
  fields["devices"] = nb::tuple(devices);
  fields["device_status"] = nb::str(device_status().c_str());
  const DeviceInfo& cpu = device_info({DeviceType::kCpu, 0});
  fields["cpu_isa"] = cpu.isa;
  fields["cpu_threads"] = cpu.num_threads;
  return fields;
}

nb::object inspect(nb::handle object) {
  const Target target = [&] {
    Target found = make_target(object, "tensor");
    set_stream(nb::none(), &found);
    return found;
  }();
  const Tensor tensor = import_tensor(object, "tensor", target);
  nb::list shape;
  nb::list strides;
  for (int i = 0; i < tensor.ndim; ++i) {
    shape.append(tensor.shape[i]);
    strides.append(tensor.strides[i]);
  }
  nb::dict fields;
  fields["pointer"] = reinterpret_cast<std::uintptr_t>(tensor.data);
  fields["dtype"] = nb::str(dtype_text(tensor.dtype).c_str());
  fields["device"] = nb::str(device_text(tensor.device).c_str());
  fields["shape"] = nb::tuple(shape);
  fields["strides"] = nb::tuple(strides);
  fields["read_only"] = tensor.read_only;
  fields["exchange_api"] = target.type->api != nullptr;
  return fields;
}

}  // namespace dlattn::python
