// The call of experts.h from XLA: puts the pairs of token and choice in the order of their experts, which costs nothing
// beside the products. A pair without an expert (padding) gives zeros.
#include "experts.h"

#include <cstring>

#include "calls.h"

namespace jpaged {
namespace {

ffi::Error Experts(ffi::ThreadPool pool, Bf16<2> x, Bf16<3> w, Int32<2> chosen, ffi::Result<Float32<2>> y) {
  int64_t X = w.dimensions()[0], N = w.dimensions()[1], E = w.dimensions()[2], P = chosen.element_count();
  int64_t choices = P / x.dimensions()[0];  // of a row of x: all of its token's, or one
  const int32_t* expert = chosen.typed_data();
  auto is_real = [&](int64_t pair) { return expert[pair] >= 0 && expert[pair] < X; };
  std::vector<int64_t> next(X + 1);  // of each expert the place of its next pair
  for (int64_t pair = 0; pair < P; ++pair) {
    if (is_real(pair)) {
      ++next[expert[pair] + 1];
    } else {
      std::memset(y->typed_data() + pair * N, 0, N * sizeof(float));
    }
  }
  std::vector<Expert> experts;
  for (int64_t i = 0; i < X; ++i) {
    if (next[i + 1] > 0) experts.push_back({Data(w) + i * N * E, next[i], next[i + 1]});
    next[i + 1] += next[i];
  }
  Pairs pairs{std::vector<const bf16*>(next[X]), std::vector<float*>(next[X])};
  for (int64_t pair = 0; pair < P; ++pair) {
    if (!is_real(pair)) continue;
    int64_t place = next[expert[pair]]++;
    pairs.x[place] = Data(x) + pair / choices * E;
    pairs.y[place] = y->typed_data() + pair * N;
  }
  MultiplyExperts(pool, pairs, experts, N, E);
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_experts, jpaged::Experts,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<jpaged::Bf16<3>>()
                                  .Arg<jpaged::Int32<2>>()
                                  .Ret<jpaged::Float32<2>>());
