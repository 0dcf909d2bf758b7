// An accelerator for torch whose memory is the host's and whose operations are the CPU's.
// Not fast: inputs and results of an operation are copied. The second of its devices has no float64.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType);  // its header takes long to compile
}

namespace {
using at::Tensor;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kPinned = 2;  // of the CPU's memory
std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, streams{0};
std::mutex lock;
std::unordered_set<const void*> pinned;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId current_stream = 0;
void (*waits)() = [] {};

constexpr size_t kHead = 64;  // ahead of a block: its length

template <int kIndex>
struct Memory final : c10::Allocator {
  static void release(void* block) {
    if (!block) return;
    auto* base = static_cast<char*>(block) - kHead;
    if constexpr (kIndex == kPinned) {
      std::lock_guard<std::mutex> guard(lock);
      pinned.erase(block);
    } else {
      live_bytes -= *reinterpret_cast<int64_t*>(base);
    }
    std::free(base);
  }
  c10::DataPtr allocate(size_t n) override {
    void* base = nullptr;
    if (posix_memalign(&base, kHead, n + kHead)) throw std::bad_alloc();
    *static_cast<int64_t*>(base) = static_cast<int64_t>(n);
    void* block = static_cast<char*>(base) + kHead;
    if constexpr (kIndex == kPinned) {
      std::lock_guard<std::mutex> guard(lock);
      pinned.insert(block);
    } else {
      int64_t now = live_bytes += n, seen = peak_bytes;
      while (now > seen && !peak_bytes.compare_exchange_weak(seen, now)) {}
    }
    return {block, block, &release, kIndex == kPinned ? c10::Device(c10::kCPU) : c10::Device(kType, kIndex)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Memory<0> first;
Memory<1> second;
Memory<kPinned> pinned_memory;
c10::Allocator* memory(c10::DeviceIndex index) {
  if (index) return &second;
  return &first;
}
struct Current final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return memory(current)->allocate(n); }
  c10::DeleterFnPtr raw_deleter() const override { return first.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Current of_current;
REGISTER_ALLOCATOR(kType, &of_current);

// all work is done when it is launched, so that streams and events are numbers
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Device getDevice() const override { return {kType, current}; }
  c10::Device exchangeDevice(c10::Device next) const override {
    return {kType, std::exchange(current, next.index())};
  }
  void setDevice(c10::Device next) const override { current = next.index(); }
  void uncheckedSetDevice(c10::Device next) const noexcept override { current = next.index(); }
  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), id);
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream(device, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++streams);
  }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(next.device(), std::exchange(current_stream, next.id()));
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { waits(); }
  void synchronizeStream(const c10::Stream&) const override { waits(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waits(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data) > 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto block = memory(storage.device().index())->allocate(n);
    std::memcpy(block.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(block));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;

std::pair<c10::Allocator*, at::ScalarType> checked(Device device, Dtype dtype) {
  auto found = c10::dtype_or_default(dtype);
  auto index = device && device->has_index() ? device->index() : current;
  TORCH_CHECK_TYPE(index == 0 || (found != at::kDouble && found != at::kComplexDouble),
                   "Cannot convert a tensor to float64: this device has none");
  return {memory(index), found};
}
Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, Device device, Flag,
             std::optional<at::MemoryFormat> format) {
  auto [from, type] = checked(device, dtype);
  return at::detail::empty_generic(size, from, kKeys, type, format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout,
                     Device device, Flag) {
  auto [from, type] = checked(device, dtype);
  return at::detail::empty_strided_generic(size, stride, from, kKeys, type);
}
Tensor on_host(const Tensor& t) {
  if (t.is_cpu()) return t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  c10::InferenceMode guard(false);
  if (to.numel()) on_host(to).copy_(on_host(self));
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(on_host(self)); }
const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t need = (c10::multiply_integers(size) + self.storage_offset()) * self.dtype().itemsize();
  if (self.storage().nbytes() < need)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t n = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, n, 1);
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}
template <bool kNarrow>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto narrow = at::autocast::get_autocast_dtype(kType);
  auto from = kNarrow ? at::kFloat : narrow, to = kNarrow ? narrow : at::kFloat;
  for (auto it = stack->end() - op.schema().arguments().size(); it != stack->end(); ++it)
    if (it->isTensor() && it->toTensor().defined() && it->toTensor().scalar_type() == from)
      *it = it->toTensor().to(to);
  op.callBoxed(stack);
}

// memory of the host is never reused too early
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", record_stream);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : {"linear", "matmul", "mm", "addmm", "bmm", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<true>>());
  for (auto* name : {"cross_entropy_loss", "nll_loss_nd", "mse_loss", "layer_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<false>>());
}
}  // namespace

extern "C" {
int64_t held_bytes() { return live_bytes; }
int64_t most_held_bytes() { return peak_bytes; }
void forget_most_held_bytes() { peak_bytes = live_bytes.load(); }
void on_wait(void (*listener)()) { waits = listener; }
}
