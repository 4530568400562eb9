// A CUDA device that does nothing, for a machine without one: in a build of PyTorch for CPUs, and in one for CUDA.
//
// FakeTensorMode computes shapes, strides and devices of CUDA tensors and never touches a device, but autograd and the
// dispatcher ask for a device guard, and PyTorch asks its hooks whether there is CUDA. Both answers stand here. The
// library must be loaded before torch first asks for its hooks: LD_PRELOAD. PyTorch's own library for CUDA is loaded
// later, and registers a guard in place of this one: `lct_install_guard`
// puts it back.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kOnly{DeviceType::CUDA, 0};

// The base class keeps no state; only what it refuses to do is replaced here.
struct NothingGuard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return kOnly; }
  Device exchangeDevice(Device) const override { return kOnly; }

  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getNewStream(Device, int) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}

 private:
  static Stream only() { return Stream(Stream::DEFAULT, kOnly); }
};

c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new NothingGuard());

// The registry finds hooks by the name of their class.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace

extern "C" void lct_install_guard() {
  c10::impl::DeviceGuardImplRegistrar again(DeviceType::CUDA, new NothingGuard());
}
