// CUDA that does nothing, for a CPU build of torch: a device guard and hooks, so that tensors which say "cuda" (or "mps", "xpu")
// pass torch's C++ and its autograd engine, and the choice of a fused attention that a GPU would make.
// tests/testbed/gpu.py builds it and loads it before torch.
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <string>

namespace {
// torch knows of one kind of accelerator in a process: the environment says which.
bool chosen(const std::string& kind) {
  const char* wanted = std::getenv("TT_STAND_IN_GPU");
  return kind == (wanted ? wanted : "cuda");
}

constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex exchanged(c10::DeviceIndex index) {
  const auto before = current;
  if (index >= 0) current = index;
  return before;
}

template <c10::DeviceType KIND>
struct Guard : c10::impl::NoOpDeviceGuardImpl<KIND> {
  static c10::Device device(c10::DeviceIndex index) { return {KIND, index}; }
  c10::Device exchangeDevice(c10::Device d) const override { return device(exchanged(d.index())); }
  c10::Device getDevice() const override { return device(current); }
  void setDevice(c10::Device d) const override { exchanged(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchanged(d.index()); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device(d.has_index() ? d.index() : current));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
c10::impl::DeviceGuardImplRegistrar cuda(c10::DeviceType::CUDA, new Guard<c10::DeviceType::CUDA>());
c10::impl::DeviceGuardImplRegistrar mps(c10::DeviceType::MPS, new Guard<c10::DeviceType::MPS>());
c10::impl::DeviceGuardImplRegistrar xpu(c10::DeviceType::XPU, new Guard<c10::DeviceType::XPU>());

// FlashAttention in half precision without a mask, the memory-efficient kernel elsewhere, products in float64.
int64_t attention(const at::Tensor& q, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
                  double, bool, std::optional<double>, bool) {
  if (q.scalar_type() == at::kDouble) return static_cast<int64_t>(sdp::SDPBackend::math);
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  return static_cast<int64_t>(half && !mask ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::efficient_attention);
}
const bool attends = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention), true);
}  // namespace

namespace at {
struct StubHooks : CUDAHooksInterface {
  explicit StubHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return chosen("cuda"); }
  bool isBuilt() const override { return hasCUDA(); }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return COUNT; }
  int getNumGPUs() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { exchanged(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchanged(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchanged(index); }
  void deviceSynchronize(DeviceIndex) const override {}
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, StubHooks)

struct StubMPSHooks : MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return chosen("mps"); }
  bool isBuilt() const override { return hasMPS(); }
  bool isAvailable() const override { return hasMPS(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, StubMPSHooks)

struct StubXPUHooks : XPUHooksInterface {
  void init() const override {}
  bool hasXPU() const override { return chosen("xpu"); }
  bool isBuilt() const override { return hasXPU(); }
  bool isAvailable() const override { return hasXPU(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, StubXPUHooks)
}  // namespace at
