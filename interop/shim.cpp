// Sits between jax-tvm-ffi and DeepGEMM's TVM-FFI functions, because jax-tvm-ffi can neither
// transpose a view, nor hand over optional arguments, nor move torch's current stream, which is
// the one that DeepGEMM launches on. Built by deep_gemm.py: with DGMOE_CUDA against torch's c10,
// without it for the CPU emulator, which gets the same tensors in the same order.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <mutex>
#include <optional>
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
using tvm::ffi::ShapeView;
using tvm::ffi::TensorView;

// A function, and the arguments that follow the tensors in the installed wheel.
struct Kernel {
  Function function;
  Array<Any> tail;
};

// One loaded copy of DeepGEMM. Its compiled kernels belong to the first GPU that runs them.
struct Library {
  Kernel fp8, bf16, fp8_masked, bf16_masked;
  Optional<Function> get_alignment, set_alignment;
  int device = -1;
};

// Never destroyed: at exit the functions' owners, Python among them, are gone before this is.
std::vector<Library>& libraries = *new std::vector<Library>;
// DeepGEMM's alignment, its compiler and its kernel cache are unguarded process-wide state.
std::mutex mutex;

void Install(Function fp8, Array<Any> fp8_tail, Function bf16, Array<Any> bf16_tail,
             Function fp8_masked, Array<Any> fp8_masked_tail, Function bf16_masked,
             Array<Any> bf16_masked_tail, Optional<Function> get_alignment,
             Optional<Function> set_alignment) {
  std::lock_guard<std::mutex> lock(mutex);
  libraries.push_back({{fp8, fp8_tail},
                       {bf16, bf16_tail},
                       {fp8_masked, fp8_masked_tail},
                       {bf16_masked, bf16_masked_tail},
                       get_alignment,
                       set_alignment});
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

#ifdef DGMOE_CUDA

class AlignmentScope {
 public:
  AlignmentScope(const Library& library, int64_t alignment)
      : set_(library.set_alignment.value()),
        previous_(library.get_alignment.value()().cast<int64_t>()) {
    set_(alignment);
  }
  ~AlignmentScope() {
    // A destructor that throws while an error of the launch unwinds would end the process.
    try {
      set_(previous_);
    } catch (...) {
    }
  }

 private:
  Function set_;
  int64_t previous_;
};

// `expected_m` follows the tensors of a masked kernel; the contiguous ones are tiled by `alignment`.
void Call(Kernel Library::*kernel, std::initializer_list<TensorView> tensors,
          std::optional<int64_t> alignment, std::optional<int64_t> expected_m) {
  const DLDevice device = tensors.begin()->device();
  std::lock_guard<std::mutex> lock(mutex);
  Library& library = LibraryFor(device.device_id);
  auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  c10::cuda::CUDAStreamGuard stream_guard(
      c10::cuda::getStreamFromExternal(stream, static_cast<c10::DeviceIndex>(device.device_id)));
  std::optional<AlignmentScope> alignment_scope;
  if (alignment) alignment_scope.emplace(library, *alignment);
  std::vector<AnyView> args(tensors.begin(), tensors.end());
  if (expected_m) args.emplace_back(*expected_m);
  for (const Any& value : (library.*kernel).tail) args.emplace_back(value);
  Any result;
  (library.*kernel).function.CallPacked(args.data(), static_cast<int32_t>(args.size()), &result);
}

#else

// A Python function must not get a non-owning view (that crashes the process): each tensor goes
// as integers: address, dtype code, bits, ndim, shape..., strides... The number comes last.
// No lock: the emulator keeps no state, and a lock held while waiting for Python's own could
// deadlock with it.
void Call(Kernel Library::*kernel, std::initializer_list<TensorView> tensors,
          std::optional<int64_t> alignment, std::optional<int64_t> expected_m) {
  std::vector<AnyView> args;
  for (const TensorView& tensor : tensors) {
    args.emplace_back(reinterpret_cast<int64_t>(tensor.data_ptr()) +
                      static_cast<int64_t>(tensor.byte_offset()));
    args.emplace_back(static_cast<int64_t>(tensor.dtype().code));
    args.emplace_back(static_cast<int64_t>(tensor.dtype().bits));
    args.emplace_back(static_cast<int64_t>(tensor.ndim()));
    for (int64_t size : tensor.shape()) args.emplace_back(size);
    for (int64_t stride : tensor.strides()) args.emplace_back(stride);
  }
  args.emplace_back(alignment ? *alignment : *expected_m);
  Library& library = LibraryFor(0);
  Any result;
  (library.*kernel).function.CallPacked(args.data(), static_cast<int32_t>(args.size()), &result);
}

#endif

// m_indices comes padded to whole blocks, because the kernels read it at every 64th row of a
// block; DeepGEMM wants to see one entry per row.
TensorView FirstRows(const TensorView& m_indices, const int64_t* rows) {
  static const int64_t one = 1;
  return m_indices.as_strided(ShapeView(rows, 1), ShapeView(&one, 1));
}

void Fp8(TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
         TensorView m_indices, TensorView d, int64_t alignment) {
  const int64_t shape[] = {a.size(0), a_scales.size(0)};
  const int64_t strides[] = {1, a_scales.size(1)};
  Call(&Library::fp8,
       {a, a_scales.as_strided(ShapeView(shape, 2), ShapeView(strides, 2)), b, b_scales, d,
        FirstRows(m_indices, shape)},
       alignment, {});
}

void Bf16(TensorView a, TensorView b, TensorView m_indices, TensorView d, int64_t alignment) {
  const int64_t rows = a.size(0);
  Call(&Library::bf16, {a, b, d, FirstRows(m_indices, &rows)}, alignment, {});
}

void Fp8Masked(TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
               TensorView masked_m, TensorView d, int64_t expected_m) {
  const int64_t shape[] = {a.size(0), a.size(1), a_scales.size(1)};
  const int64_t strides[] = {a_scales.size(1) * a_scales.size(2), 1, a_scales.size(2)};
  Call(&Library::fp8_masked,
       {a, a_scales.as_strided(ShapeView(shape, 3), ShapeView(strides, 3)), b, b_scales, d,
        masked_m},
       {}, expected_m);
}

void Bf16Masked(TensorView a, TensorView b, TensorView masked_m, TensorView d,
                int64_t expected_m) {
  Call(&Library::bf16_masked, {a, b, d, masked_m}, {}, expected_m);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(install, Install);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(m_grouped_fp8_fp4_gemm_nt_contiguous, Fp8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(m_grouped_bf16_gemm_nt_contiguous, Bf16);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(m_grouped_fp8_fp4_gemm_nt_masked, Fp8Masked);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(m_grouped_bf16_gemm_nt_masked, Bf16Masked);
