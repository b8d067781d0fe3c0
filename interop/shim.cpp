// Sits between jax-tvm-ffi and DeepGEMM's TVM-FFI functions, because jax-tvm-ffi can neither
// transpose a view, nor hand over optional arguments, nor move torch's current stream, which is
// the one that DeepGEMM launches on. Built by bridge.py: with DGMOE_CUDA against torch's c10,
// without it for the CPU emulator, which gets the same arguments in the same order.
//
// Every function takes the one path of Call. What differs is data, made by bridge.py.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>
#include <vector>

#ifdef DGMOE_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Optional;
using tvm::ffi::PackedArgs;
using tvm::ffi::ShapeView;
using tvm::ffi::TensorView;

// A function of the library. Its argument i is the call's argument sources[i]; it is defaults[i]
// where that source is 0 or an empty array.
struct Kernel {
  Optional<Function> function;  // none where the wheel lacks it
  Array<int64_t> sources;
  Array<Any> defaults;
};

// A setting of the library. `initial` is what to restore where there is no getter.
struct Setting {
  Optional<Function> get, set;
  Array<Any> initial;
};

// One loaded copy of DeepGEMM. Its compiled kernels belong to the first GPU that runs them: with a
// copy for each GPU, `device` is the copy's own; a library that is alone (-1) takes the first.
struct Library {
  std::vector<Kernel> kernels;
  std::vector<Setting> settings;
  int device;
};

// Never destroyed: at exit the functions' owners, Python among them, are gone before this is.
std::vector<Library>& libraries = *new std::vector<Library>;
// DeepGEMM's settings, its compiler and its kernel cache are unguarded process-wide state. The
// emulator waits for Python's lock while it holds this one, so nobody may wait for this one with
// Python's: JAX and tvm-ffi both let go of it before they call.
std::mutex mutex;

void Install(Array<Array<Any>> kernels, Array<Array<Any>> settings, int64_t device) {
  Library library{{}, {}, static_cast<int>(device)};
  for (const Array<Any>& kernel : kernels)
    library.kernels.push_back({kernel[0].cast<Optional<Function>>(), kernel[1].cast<Array<int64_t>>(),
                               kernel[2].cast<Array<Any>>()});
  for (const Array<Any>& setting : settings)
    library.settings.push_back({setting[0].cast<Optional<Function>>(),
                                setting[1].cast<Optional<Function>>(),
                                setting[2].cast<Array<Any>>()});
  std::lock_guard<std::mutex> lock(mutex);
  libraries.push_back(std::move(library));
}

Library& LibraryFor(int device) {
  for (Library& library : libraries)
    if (library.device == device) return library;
  for (Library& library : libraries)
    if (library.device < 0) {
      library.device = device;
      return library;
    }
  TVM_FFI_THROW(RuntimeError) << "DeepGEMM in this process belongs to GPU "
                              << (libraries.empty() ? -1 : libraries.front().device)
                              << " and cannot run on GPU " << device
                              << ": use one process per GPU";
  TVM_FFI_UNREACHABLE();
}

// The index of a device's library, for tests.
int64_t LibraryIndex(int64_t device) {
  std::lock_guard<std::mutex> lock(mutex);
  return &LibraryFor(static_cast<int>(device)) - libraries.data();
}

void CallWith(const Function& function, const std::vector<AnyView>& args, Any* result) {
  function.CallPacked(args.data(), static_cast<int32_t>(args.size()), result);
}

// Settings that last until the end of the scope.
class SettingsScope {
 public:
  void Set(const Setting& setting, const Array<Any>& value) {
    if (!setting.set.has_value())
      TVM_FFI_THROW(RuntimeError) << "this wheel of DeepGEMM lacks a setting that the call names";
    std::vector<Any> previous(setting.initial.begin(), setting.initial.end());
    if (setting.get.has_value()) previous = {setting.get.value()()};
    previous_.emplace_back(setting.set.value(), std::move(previous));
    Apply(setting.set.value(), {value.begin(), value.end()});
  }
  ~SettingsScope() {
    std::reverse(previous_.begin(), previous_.end());
    for (const auto& [set, value] : previous_) {
      // A destructor that throws while an error of the launch unwinds would end the process.
      try {
        Apply(set, value);
      } catch (...) {
      }
    }
  }

 private:
  static void Apply(const Function& set, const std::vector<Any>& value) {
    Any result;
    CallWith(set, {value.begin(), value.end()}, &result);
  }
  std::vector<std::pair<Function, std::vector<Any>>> previous_;
};

constexpr int kMaxDimensions = 4;
using Layout = std::array<int64_t, 2 * kMaxDimensions>;

// XLA's arrays are row-major. A view of `size` >= 0 keeps the first `size` entries of the last
// dimension, and shows a matrix, or each of a stack of them, transposed: that is how scales become
// MN-major, and how what was padded for a kernel's reads gets the length that DeepGEMM checks.
TensorView View(const TensorView& tensor, int64_t size, Layout& layout) {
  const int n = tensor.ndim();
  if (size < 0) return tensor;
  TVM_FFI_ICHECK_LE(n, kMaxDimensions);
  int64_t *shape = layout.data(), *strides = shape + kMaxDimensions;
  std::copy_n(tensor.shape().data(), n, shape);
  std::copy_n(tensor.strides().data(), n, strides);
  shape[n - 1] = size;
  if (n > 1) {
    std::swap(shape[n - 2], shape[n - 1]);
    std::swap(strides[n - 2], strides[n - 1]);
  }
  return tensor.as_strided(ShapeView(shape, n), ShapeView(strides, n));
}

void Append(std::vector<AnyView>& args, const TensorView& tensor) {
#ifdef DGMOE_CUDA
  args.emplace_back(tensor);
#else
  // A Python function must not get a non-owning view (that crashes the process): each tensor goes
  // as integers: address, dtype code, bits, ndim, shape..., strides...
  args.emplace_back(reinterpret_cast<int64_t>(tensor.data_ptr()) +
                    static_cast<int64_t>(tensor.byte_offset()));
  args.emplace_back(static_cast<int64_t>(tensor.dtype().code));
  args.emplace_back(static_cast<int64_t>(tensor.dtype().bits));
  args.emplace_back(static_cast<int64_t>(tensor.ndim()));
  for (int64_t size : tensor.shape()) args.emplace_back(size);
  for (int64_t stride : tensor.strides()) args.emplace_back(stride);
#endif
}

bool IsUnset(const AnyView& value) {
  auto array = value.as<Array<Any>>();
  return array.has_value() && array->empty();
}

// call: the views (an array), a tensor for each of them, the function's attributes, and a value of
// every setting, empty where the library's own is to be left alone.
void Call(size_t index, PackedArgs call, Any* result) {
  const auto views = call[0].cast<Array<int64_t>>();
  std::vector<Layout> layouts(views.size());
  std::vector<TensorView> tensors;
  for (size_t i = 0; i < views.size(); ++i)
    tensors.push_back(View(call[i + 1].cast<TensorView>(), views[i], layouts[i]));

  std::lock_guard<std::mutex> lock(mutex);
  const DLDevice device = tensors.front().device();
  const Library& library = LibraryFor(device.device_id);
#ifdef DGMOE_CUDA
  auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  c10::cuda::CUDAStreamGuard stream_guard(
      c10::cuda::getStreamFromExternal(stream, static_cast<c10::DeviceIndex>(device.device_id)));
#endif

  SettingsScope scope;
  const size_t first = call.size() - library.settings.size();
  for (size_t i = 0; i < library.settings.size(); ++i)
    if (!IsUnset(call[first + i]))
      scope.Set(library.settings[i], call[first + i].cast<Array<Any>>());

  const Kernel& kernel = library.kernels[index];
  if (!kernel.function.has_value())
    TVM_FFI_THROW(RuntimeError) << "this wheel of DeepGEMM lacks the function of the call";
  std::vector<AnyView> args;
  for (size_t i = 0; i < kernel.sources.size(); ++i) {
    const size_t source = kernel.sources[i];
    if (source != 0 && source <= tensors.size())
      Append(args, tensors[source - 1]);
    else if (source == 0 || IsUnset(call[source]))
      args.emplace_back(kernel.defaults[i]);
    else
      args.emplace_back(call[source]);
  }
  CallWith(kernel.function.value(), args, result);
}

// The function to register with XLA for kernel `index` of the installed libraries.
Function Target(int64_t index) {
  return Function::FromPacked(
      [index](PackedArgs call, Any* result) { Call(static_cast<size_t>(index), call, result); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(install, Install);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(target, Target);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(library_index, LibraryIndex);
