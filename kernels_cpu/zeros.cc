// Arrays of zeros whose pages are not there before somebody writes to them: a pool of keys and values is as large as it may
// become, and most of it is never used.
#include "zeros.h"

#include "calls.h"

namespace jpaged {
namespace {

// out: any array. parts: of huge pages, see MakeZeros.
ffi::Error Zeros(ffi::Result<ffi::AnyBuffer> out, int64_t parts) {
  char* begin = static_cast<char*>(out->untyped_data());
  MakeZeros(begin, begin + out->size_bytes(), parts);
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_zeros, jpaged::Zeros,
                              xla::ffi::Ffi::Bind().Ret<xla::ffi::AnyBuffer>().Attr<int64_t>("parts"));
