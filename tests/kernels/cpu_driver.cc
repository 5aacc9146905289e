// Runs every kernel of a level without Python and XLA, on inputs that end where their memory does, and holds it to a
// definition in plain C++ and f64. It prints a line a case: its name and a hash of the result's bits, so that levels can be
// compared; and it fails where a result is further from the definition than rounding explains.
//
// test_cpu_builds.py compiles it with the sanitizers, and for ARM, to run under qemu.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>

#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "experts.h"
#include "gated_delta.h"
#include "group_attention.h"
#include "head_write.h"
#include "linear.h"
#include "low_rank.h"
#include "mamba2.h"
#include "mlp.h"
#include "norm.h"
#include "paged_attention.h"
#include "panels.h"
#include "quantize.h"
#include "quantized.h"
#include "zeros.h"

// The kernels know XLA's pool by its name. This one has two threads, of which one is made for each task.
class xla::ffi::ThreadPool {
 public:
  ~ThreadPool() {
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<std::thread> threads;
};

namespace jpaged {

int64_t NumThreads(ffi::ThreadPool&) { return 2; }
void Schedule(ffi::ThreadPool& pool, void (*task)(void* data), void* data) { pool.threads.emplace_back(task, data); }

namespace {

int failures = 0;

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t Bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return state_ >> 33;
  }
  float Number() {  // about normal
    float sum = -2;
    for (int i = 0; i < 4; ++i) sum += Bits() * 0x1p-31f;
    return sum * 1.7f;
  }
  std::vector<bf16> Bf16s(int64_t count, float scale = 1) {
    std::vector<bf16> all(count);
    for (bf16& x : all) x = ToBf16(Number() * scale);
    return all;
  }
  std::vector<float> Floats(int64_t count, float low, float high) {
    std::vector<float> all(count);
    for (float& x : all) x = low + (high - low) * (Bits() * 0x1p-31f);
    return all;
  }

 private:
  uint64_t state_;
};

double FromE4m3(uint8_t bits) {
  static const std::vector<double> all = [] {  // std::ldexp is slow, and this is called for each of a row's numbers
    std::vector<double> values(256);
    for (int i = 0; i < 256; ++i) {
      int exponent = i >> 3 & 15, mantissa = i & 7;
      double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      values[i] = i & 0x80 ? -size : size;
    }
    return values;
  }();
  return all[bits];
}

float AsFloat(float x) { return x; }
float AsFloat(bf16 x) { return FromBf16(x); }

// allowed: of each element, how far it may be from the definition.
template <typename T>
void Check(const std::string& name, const std::vector<T>& y, const std::vector<double>& wanted,
           const std::vector<double>& allowed) {
  uint64_t hash = 14695981039346656037ull;
  for (size_t i = 0; i < y.size(); ++i) {
    double error = std::fabs(AsFloat(y[i]) - wanted[i]);
    if (!(error <= allowed[i])) {
      if (++failures < 20) {
        std::printf("FAILED %s [%zu]: %.9g, wanted %.9g within %.3g\n", name.c_str(), i, AsFloat(y[i]), wanted[i], allowed[i]);
      }
    }
    uint32_t bits = 0;
    std::memcpy(&bits, &y[i], sizeof(T));
    hash = (hash ^ bits) * 1099511628211ull;
  }
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

// A product's definition: y and how far from it sums in f32 may be.
struct Product {
  std::vector<double> y, allowed;

  template <typename X, typename W>
  Product(int64_t T, int64_t N, int64_t E, const X& x, const W& w, double more = 0) : y(T * N), allowed(T * N) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t n = 0; n < N; ++n) {
        double size = 0, sum = 0;
        for (int64_t e = 0; e < E; ++e) sum += x(t, e) * w(n, e), size += std::fabs(x(t, e) * w(n, e));
        y[t * N + n] = sum, allowed[t * N + n] = size * 3e-6 + std::fabs(sum) * more + 1e-30;
      }
    }
  }
};

const int64_t kShapes[][3] = {{1, 1, 32}, {3, 4, 64}, {4, 13, 96}, {9, 50, 160}, {35, 26, 288}, {70, 9, 544}, {259, 50, 160}};

void Linear(ffi::ThreadPool& pool, int64_t T, int64_t N, int64_t E) {
  Random random(T + N);
  auto x = random.Bf16s(T * E), w = random.Bf16s(N * E, 0.1f);
  std::vector<float> y(T * N);
  std::vector<bf16> rounded(T * N);
  Multiply(pool, x.data(), w.data(), y.data(), T, N, E), Multiply(pool, x.data(), w.data(), rounded.data(), T, N, E);
  auto from = [&](const std::vector<bf16>& all) {
    return [&all, E](int64_t i, int64_t e) -> double { return FromBf16(all[i * E + e]); };
  };
  std::string name = std::to_string(T) + "x" + std::to_string(N) + "x" + std::to_string(E);
  Product exact(T, N, E, from(x), from(w)), coarse(T, N, E, from(x), from(w), 0x1p-8);
  Check("linear f32 " + name, y, exact.y, exact.allowed), Check("linear bf16 " + name, rounded, coarse.y, coarse.allowed);
  std::vector<float> alone(N);
  for (int64_t t : {int64_t{0}, T / 2, T - 1}) {
    Multiply(pool, &x[t * E], w.data(), alone.data(), 1, N, E);
    if (std::memcmp(alone.data(), &y[t * N], N * sizeof(float)) != 0 && ++failures < 20) {
      std::printf("FAILED linear %s: row %lld has other bits alone\n", name.c_str(), static_cast<long long>(t));
    }
  }
  std::vector<float> of_experts(T * N);
  Pairs pairs;
  for (int64_t t = 0; t < T; ++t) pairs.x.push_back(&x[t * E]), pairs.y.push_back(&of_experts[t * N]);
  std::vector<Expert> experts{{w.data(), 0, (T + 1) / 2}};
  if (T > 1) experts.push_back({w.data(), (T + 1) / 2, T / 2});
  MultiplyExperts(pool, pairs, experts, N, E);
  Check("experts " + name, of_experts, exact.y, exact.allowed);
}

// The last ones are of more rows than AMX takes at once of rows so wide, of more results than its cache holds, and of rows in parts,
// which AVX2 and NEON make of many.
void LinearCases(ffi::ThreadPool& pool) {
  for (auto [T, N, E] : kShapes) Linear(pool, T, N, E);
  Linear(pool, 140, 5, 8192), Linear(pool, 260, 2080, 32), Linear(pool, 523, 40, 160);
}

// What lies on both sides of the zeros stays; the longer ones have whole pages in them, which are not written.
void Zeros() {
  for (int64_t count : {1, 1500, 100001}) {
    std::vector<float> y(count + 2000, 7);
    std::vector<double> wanted(y.begin(), y.end()), allowed(y.size(), 0);
    std::fill_n(wanted.begin() + 1001, count, 0);
    char* begin = reinterpret_cast<char*>(&y[1001]);
    MakeZeros(begin, begin + count * sizeof(float), 3);
    Check("zeros " + std::to_string(count), y, wanted, allowed);
  }
}

template <typename X>
void PanelsOf(ffi::ThreadPool& pool, const char* dtype, int64_t T, int64_t N, int64_t E, const std::vector<X>& x,
              const std::vector<X>& w) {
  std::vector<float> y(T * N), packed((T + kPanelRows - 1) / kPanelRows * kPanelRows * E);
  MultiplyPanels(pool, x.data(), w.data(), packed.data(), y.data(), T, N, E);
  auto from = [E](const std::vector<X>& all) {
    return [&all, E](int64_t i, int64_t e) -> double { return AsFloat(all[i * E + e]); };
  };
  Product exact(T, N, E, from(x), from(w));
  Check(std::string("panels ") + dtype + " " + std::to_string(T) + "x" + std::to_string(N) + "x" + std::to_string(E), y, exact.y,
        exact.allowed);
}

// Rows and columns that are no whole tiles, depths of several blocks, more rows than are taken at once, and few columns.
void Panels(ffi::ThreadPool& pool) {
  for (auto [T, N, E] : {std::array<int64_t, 3>{1, 1, 5}, {13, 100, 300}, {12, 64, 256}, {251, 33, 513}, {500, 16, 40}}) {
    Random random(T + N);
    auto x = random.Floats(T * E, -1, 1), w = random.Floats(N * E, -1, 1);
    auto half_x = random.Bf16s(T * E), half_w = random.Bf16s(N * E);
    PanelsOf(pool, "f32", T, N, E, x, w), PanelsOf(pool, "bf16", T, N, E, half_x, half_w);
  }
}

struct GroupCase {
  std::vector<int64_t> lengths;  // of images, after which there is padding
  int64_t N, H, K, D, V;
  bool windows;
};

// Zeros are wanted of padding, whatever was there before.
template <typename X>
void Groups(ffi::ThreadPool& pool, const char* dtype, const GroupCase& c) {
  Random random(c.N + c.D);
  auto numbers = [&](int64_t count) {
    std::vector<X> all(count);
    for (X& x : all) {
      if constexpr (sizeof(X) == 2) {
        x = ToBf16(random.Number());
      } else {
        x = random.Number();
      }
    }
    return all;
  };
  auto q = numbers(c.N * c.H * c.D), k = numbers(c.N * c.K * c.D), v = numbers(c.N * c.K * c.V);
  int64_t G = c.windows ? 2 : 1;
  std::vector<int32_t> groups(G * c.N, -1);
  int64_t real = 0;
  for (size_t image = 0; image < c.lengths.size(); ++image) {
    for (int64_t i = 0; i < c.lengths[image]; ++i, ++real) {
      groups[real] = image;
      if (c.windows) groups[c.N + real] = i / 3 % 4;
    }
  }
  std::vector<X> o(c.N * c.H * c.V, X{1});
  std::vector<float> packed(c.K * PackedKeys(c.N) * (c.D + PackedWidth(c.V)));
  GroupProblem p{.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .in_bf16 = sizeof(X) == 2, .groups = groups.data()};
  p.packed = packed.data(), p.N = c.N, p.H = c.H, p.K = c.K, p.D = c.D, p.V = c.V, p.G = G, p.scale = 0.3f;
  AttendGroups(pool, p);
  std::vector<double> wanted(o.size()), allowed(o.size());
  for (int64_t t = 0; t < real; ++t) {
    for (int64_t h = 0; h < c.H; ++h) {
      int64_t head = h / (c.H / c.K);
      std::vector<double> weights(real);
      double top = -1e30, total = 0;
      auto sees = [&](int64_t n) { return groups[n] == groups[t] && groups[(G - 1) * c.N + n] == groups[(G - 1) * c.N + t]; };
      for (int64_t n = 0; n < real; ++n) {
        for (int64_t d = 0; d < c.D; ++d) weights[n] += AsFloat(q[(t * c.H + h) * c.D + d]) * AsFloat(k[(n * c.K + head) * c.D + d]);
        weights[n] *= p.scale;
        if (sees(n)) top = std::max(top, weights[n]);
      }
      for (int64_t n = 0; n < real; ++n) weights[n] = sees(n) ? std::exp(weights[n] - top) : 0, total += weights[n];
      for (int64_t d = 0; d < c.V; ++d) {
        double sum = 0, size = 0;
        for (int64_t n = 0; n < real; ++n) {
          double part = weights[n] / total * AsFloat(v[(n * c.K + head) * c.V + d]);
          sum += part, size += std::fabs(part);
        }
        int64_t place = (t * c.H + h) * c.V + d;
        wanted[place] = sum, allowed[place] = size * 2e-5 + (sizeof(X) == 2 ? std::fabs(sum) * 0x1p-8 : 0) + 1e-7;
      }
    }
  }
  Check(std::string("groups ") + dtype + " " + std::to_string(c.N) + " " + std::to_string(real) + " " + std::to_string(c.D) +
            (c.windows ? " windows" : ""),
        o, wanted, allowed);
}

void GroupCases(ffi::ThreadPool& pool) {
  const GroupCase cases[] = {{{1}, 1, 1, 1, 4, 4, false},           {{300}, 300, 2, 2, 64, 64, false},
                             {{30, 150, 7}, 200, 4, 2, 24, 40, false}, {{270, 100}, 512, 1, 1, 72, 72, false},
                             {{140, 60}, 230, 2, 1, 16, 16, true},  {{}, 9, 1, 1, 8, 8, false}};
  for (const GroupCase& c : cases) Groups<float>(pool, "f32", c), Groups<bf16>(pool, "bf16", c);
}

// Each number alone has the bits that it has among others, and of a part that is not of whole registers.
void FunctionCases(ffi::ThreadPool& pool) {
  struct Case {
    Function function;
    const char* name;
    double (*exact)(double);
  };
  const Case cases[] = {
      {Function::kExp, "exp", [](double x) { return std::exp(x); }},
      {Function::kSigmoid, "sigmoid", [](double x) { return 1 / (1 + std::exp(-x)); }},
      {Function::kSilu, "silu", [](double x) { return x / (1 + std::exp(-x)); }},
      {Function::kSoftplus, "softplus", [](double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); }},
      {Function::kGeluTanh, "gelu",
       [](double x) { return x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))); }},
  };
  for (const Case& c : cases) {
    for (int64_t count : {7, 20000}) {
      auto x = Random(count).Floats(count, -20, 20);
      x[0] = 0, x[1] = 80, x[2] = -80, x[3] = 1e-6f;
      std::vector<float> y(count), alone(1);
      Apply(pool, c.function, x.data(), y.data(), count);
      std::vector<double> wanted(count), allowed(count);
      for (int64_t i = 0; i < count; ++i) {
        wanted[i] = c.exact(x[i]);
        // The argument of a sigmoid has errors of its own where it is a polynomial.
        allowed[i] = std::fabs(wanted[i]) * (c.function == Function::kGeluTanh ? 4e-5 : 5e-7) + 1e-30;
      }
      std::string name = std::string("function ") + c.name + " " + std::to_string(count);
      for (int64_t i = 0; i < count; i += 13) {
        Apply(pool, c.function, &x[i], alone.data(), 1);
        if (std::memcmp(&alone[0], &y[i], sizeof(float)) != 0) {
          ++failures, std::printf("FAILED %s: number %lld alone has other bits\n", name.c_str(), static_cast<long long>(i));
          break;
        }
      }
      Check(name, y, wanted, allowed);
    }
  }
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float x[] = {infinity, -infinity, nan}, wanted[][2] = {{infinity, 0}, {1, 0}, {infinity, -infinity}, {infinity, 0}, {infinity, -infinity}};
  for (const Case& c : cases) {
    float y[3];
    Apply(pool, c.function, x, y, 3);
    const float* ends = wanted[static_cast<int>(c.function)];
    bool is_right = y[0] == ends[0] && (y[1] == ends[1] || std::fabs(y[1] - ends[1]) < 1e-30f) && y[2] != y[2];
    if (!is_right) ++failures, std::printf("FAILED function %s of what is not finite: %g %g %g\n", c.name, y[0], y[1], y[2]);
  }
}

// The second is of more numbers than one thread activates before another begins.
void ActivationCases(ffi::ThreadPool& pool) {
  for (auto [T, F] : {std::array<int64_t, 2>{1, 5}, {3, 5000}, {9, 96}}) {
    Random random(F);
    auto gate_up = random.Floats(T * 2 * F, -12, 12);
    for (Activation kind : {Activation::kSilu, Activation::kGeluTanh}) {
      std::vector<bf16> h(T * F);
      Activate(pool, kind, gate_up.data(), h.data(), T, F);
      std::vector<double> wanted(T * F), allowed(T * F);
      for (int64_t i = 0; i < T * F; ++i) {
        double gate = gate_up[i / F * 2 * F + i % F], up = gate_up[(i / F * 2 + 1) * F + i % F];
        double u = kind == Activation::kSilu ? gate : 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate);
        wanted[i] = gate / (1 + std::exp(-u)) * up, allowed[i] = std::fabs(wanted[i]) * 0.00392 + 1e-30;
      }
      Check(std::string("activation ") + (kind == Activation::kSilu ? "silu " : "gelu ") + std::to_string(T) + "x" + std::to_string(F),
            h, wanted, allowed);
    }
  }
}

// The whole feed-forward part has the bits of its products and what is between them.
template <typename Out>
void Mlps(ffi::ThreadPool& pool, Activation kind, int64_t T, int64_t N, int64_t E, int64_t F) {
  Random random(T + F);
  auto x = random.Bf16s(T * E), gate_up = random.Bf16s(2 * F * E, 0.3f), down = random.Bf16s(N * F, 0.1f), h = random.Bf16s(T * F);
  std::vector<float> between(T * 2 * F);
  std::vector<Out> parts(T * N), whole(T * N);
  Multiply(pool, x.data(), gate_up.data(), between.data(), T, 2 * F, E);
  Activate(pool, kind, between.data(), h.data(), T, F);
  Multiply(pool, h.data(), down.data(), parts.data(), T, N, F);
  if (!Mlp(pool, kind, x.data(), gate_up.data(), down.data(), whole.data(), T, N, E, F)) whole = parts;
  std::vector<double> wanted(parts.size());
  std::transform(parts.begin(), parts.end(), wanted.begin(), [](Out y) { return AsFloat(y); });
  Check(std::string("mlp ") + (kind == Activation::kSilu ? "silu " : "gelu ") + (sizeof(Out) == 4 ? "f32 " : "bf16 ") +
            std::to_string(T) + "x" + std::to_string(E) + "x" + std::to_string(F), whole, wanted, std::vector<double>(T * N));
}

// The same of weights in 8 and 4 bits, with a scale a row or for each 32 inputs; and a product that is rounded has the bits of one in
// f32. Levels without either are held to nothing.
template <typename Out>
void QuantizedMlps(ffi::ThreadPool& pool, Activation kind, Form form, int64_t T, int64_t N, int64_t E, int64_t F) {
  Random random(T + F);
  auto x = random.Bf16s(T * E), h = random.Bf16s(T * F);
  std::vector<uint8_t> values(Bytes(form, (2 * E + N) * F));
  for (uint8_t& value : values) {
    value = random.Bits();
    if (form == Form::kE4m3 && (value & 0x7f) == 0x7f) value = 0;  // no number
  }
  bool is_int4 = form == Form::kInt4;
  auto scales = random.Floats((2 * E + N) * F, 0.001f, 0.01f);
  Quantized gate_up{form, values.data(), scales.data(), nullptr, 2 * F, E, is_int4 ? E / kPacked : 1};
  Quantized down{form, &values[Bytes(form, 2 * F * E)], &scales[2 * F], nullptr, N, F, is_int4 ? F / kPacked : 1};
  std::vector<float> between(T * 2 * F), in_f32(T * N);
  Multiply(pool, x.data(), gate_up, Activations::kPlain, between.data(), T);
  Activate(pool, kind, between.data(), h.data(), T, F);
  Multiply(pool, h.data(), down, Activations::kPlain, in_f32.data(), T);
  std::vector<Out> parts(T * N), whole(T * N), rounded(T * N);
  std::transform(in_f32.begin(), in_f32.end(), parts.begin(), [](float y) {
    if constexpr (sizeof(Out) == 2) return ToBf16(y); else return y;
  });
  if (!Mlp(pool, kind, x.data(), gate_up, down, Activations::kPlain, whole.data(), T)) whole = parts;
  if constexpr (sizeof(Out) == 2) {
    if (!Multiply(pool, h.data(), down, Activations::kPlain, rounded.data(), T)) rounded = parts;
  } else {
    rounded = parts;
  }
  std::vector<double> wanted(parts.size());
  std::transform(parts.begin(), parts.end(), wanted.begin(), [](Out y) { return AsFloat(y); });
  std::string name = std::string("mlp ") + (is_int4 ? "int4 " : form == Form::kInt8 ? "int8 " : "fp8 ") + (kind == Activation::kSilu ? "silu " : "gelu ") +
                     (sizeof(Out) == 4 ? "f32 " : "bf16 ") + std::to_string(T) + "x" + std::to_string(E) + "x" + std::to_string(F);
  Check(name, whole, wanted, std::vector<double>(T * N)), Check(name + " down", rounded, wanted, std::vector<double>(T * N));
}

void MlpCases(ffi::ThreadPool& pool) {
  for (Activation kind : {Activation::kSilu, Activation::kGeluTanh}) {
    for (auto [T, N, E, F] : {std::array<int64_t, 4>{523, 50, 96, 160}, {300, 9, 64, 32}, {7, 9, 64, 96}}) {
      Mlps<float>(pool, kind, T, N, E, F), Mlps<bf16>(pool, kind, T, N, E, F);
    }
    for (Form form : {Form::kInt8, Form::kInt4, Form::kE4m3}) {
      for (auto [T, N, E, F] : {std::array<int64_t, 4>{259, 50, 96, 160}, {70, 150, 160, 96}, {7, 9, 64, 96}}) {
        QuantizedMlps<float>(pool, kind, form, T, N, E, F), QuantizedMlps<bf16>(pool, kind, form, T, N, E, F);
      }
    }
  }
}

// Rows of norms, some of them a million times as large as others, and of sums that are normed; a row alone has the bits that it has among
// others. A NaN stays one, whatever its bits.
void Norms() {
  for (auto [in_f32, adds, E] : {std::tuple<bool, bool, int64_t>{false, false, 48}, {true, false, 48}, {false, true, 48}, {true, true, 96}}) {
    const int64_t T = 7;
    Random random(E);
    auto x = random.Bf16s(T * E), added = random.Bf16s(T * E);
    auto scale = random.Floats(E, 0.5f, 2);
    double rounding = 0.00392 * (in_f32 ? 1 : 2);
    for (int64_t i = 0; i < T * E; ++i) x[i] = ToBf16(FromBf16(x[i]) * std::ldexp(1.0f, i / E % 3 * 10 - 10));
    std::vector<bf16> y(T * E), sum(x), alone(T * E), sum_alone(T * E);
    std::vector<double> wanted(T * E), allowed(T * E), wanted_sum(T * E), exactly(T * E);
    for (int64_t i = 0; adds && i < T * E; ++i) sum[i] = ToBf16(FromBf16(x[i]) + FromBf16(added[i]));
    for (int64_t t = 0; t < T; ++t) {
      double squares = 0;
      for (int64_t e = t * E; e < (t + 1) * E; ++e) squares += double{FromBf16(sum[e])} * FromBf16(sum[e]);
      for (int64_t e = 0; e < E; ++e) {
        int64_t i = t * E + e;
        wanted_sum[i] = FromBf16(sum[i]);
        wanted[i] = FromBf16(sum[i]) * scale[e] / std::sqrt(squares / E + 1e-6), allowed[i] = std::fabs(wanted[i]) * rounding;
      }
    }
    NormProblem p{.x = x.data(), .scale = scale.data(), .y = y.data(), .E = E, .eps = 1e-6f, .in_f32 = in_f32};
    if (adds) p.added = added.data(), p.sum = sum.data();
    std::fill(sum.begin(), sum.end(), 0);
    NormRows(p, 0, T);
    std::string name = std::string(in_f32 ? "norm in f32" : "norm") + (adds ? " of a sum" : "");
    Check(name, y, wanted, allowed);
    if (adds) Check(name + " before", sum, wanted_sum, exactly);
    p.y = alone.data();
    if (adds) p.sum = sum_alone.data();
    for (int64_t t = 0; t < T; ++t) NormRows(p, t, t + 1);
    if (alone != y || (adds && sum_alone != sum)) ++failures, std::printf("FAILED %s of a row alone\n", name.c_str());
    for (bf16 nan : {0x7fff, 0xffff, 0x7f81}) {
      x[E + 5] = nan;
      NormRows(p, 1, 2);
      for (int64_t e = E; e < 2 * E; ++e) {
        if (!std::isnan(FromBf16(alone[e]))) ++failures, std::printf("FAILED %s of NaN\n", name.c_str());
      }
    }
  }
}

struct HeadCase {
  int64_t T, K, G, D, half;
  bool norm, in_f32;
  float size = 1;
};

// A token in three is dropped, by a slot on either side of the layer's. A token alone has the bits that it has among others. A NaN stays one,
// whatever its bits.
void HeadWrites() {
  const HeadCase cases[] = {{3, 1, 1, 32, 16, true, false},  {7, 2, 3, 96, 32, true, true},
                            {5, 3, 2, 64, 0, false, false},  {4, 2, 2, 64, 20, true, false},
                            {4, 9, 1, 128, 64, true, false}, {4, 1, 2, 32, 16, false, false, 0x1p-127f}};
  for (const HeadCase& c : cases) {
    Random random(c.D);
    int64_t slots = 10, layers = 3, row = c.D, X = c.G + 2;
    auto qkv = random.Bf16s(c.T * c.K * X * row, c.size), pool = random.Bf16s(layers * slots * 2 * c.K * row);
    auto q_scale = random.Floats(row, 0.5f, 2), k_scale = random.Floats(row, 0.5f, 2), angles = random.Floats(c.T * c.half, -9, 9);
    std::vector<float> cos(angles.size()), sin(angles.size());
    for (float& scale : q_scale) scale = FromBf16(ToBf16(scale));
    for (float& scale : k_scale) scale = FromBf16(ToBf16(scale));
    for (size_t i = 0; i < angles.size(); ++i) cos[i] = std::cos(angles[i]), sin[i] = std::sin(angles[i]);
    std::vector<int32_t> to(c.T);
    for (int64_t t = 0; t < c.T; ++t) to[t] = t % 3 != 1 ? (3 * t) % slots : t % 2 == 0 ? -1 : slots;
    std::vector<bf16> q(c.T * c.K * c.G * row);
    std::vector<double> wanted_q(q.size()), wanted(pool.size()), allowed_q(q.size()), allowed(pool.size());
    for (size_t i = 0; i < pool.size(); ++i) wanted[i] = FromBf16(pool[i]);
    auto prepare = [&](int64_t t, const bf16* from, const float* scale, double* y, double* within) {
      std::vector<double> x(row);
      double sum = 0;
      for (int64_t d = 0; d < row; ++d) x[d] = FromBf16(from[d]), sum += x[d] * x[d];
      for (int64_t d = 0; d < row && c.norm; ++d) x[d] *= scale[d] / std::sqrt(sum / row + 1e-6);
      for (int64_t d = 0; d < row; ++d) {
        int64_t i = d % std::max<int64_t>(1, c.half), pair = d < c.half ? d + c.half : d - c.half;
        bool turns = d < 2 * c.half;
        double of_cos = turns ? cos[t * c.half + i] : 1, of_sin = !turns ? 0 : (d < c.half ? -1 : 1) * sin[t * c.half + i];
        y[d] = x[d] * of_cos + (turns ? x[pair] * of_sin : 0);
        // A number and its pair are rounded once or twice, and their sum once.
        double size = std::fabs(x[d] * of_cos) + (turns ? std::fabs(x[pair] * of_sin) : 0);
        // Denormal results are off by up to half of the least bf16.
        double turned = std::fabs(y[d]) * 0.00392 + size * 1e-6 + 0x1p-134;
        within[d] = (c.norm ? size * 2 * 0.00392 : 0) + (turns ? turned : 0);
      }
    };
    for (int64_t t = 0; t < c.T; ++t) {
      for (int64_t k = 0; k < c.K; ++k) {
        const bf16* from = &qkv[(t * c.K + k) * X * row];
        for (int64_t g = 0; g < c.G; ++g) {
          int64_t at = ((t * c.K + k) * c.G + g) * row;
          prepare(t, from + g * row, q_scale.data(), &wanted_q[at], &allowed_q[at]);
        }
        if (t % 3 == 1) continue;
        int64_t at = ((slots + to[t]) * 2 * c.K + 2 * k) * row;
        prepare(t, from + c.G * row, k_scale.data(), &wanted[at], &allowed[at]);
        for (int64_t d = 0; d < row; ++d) wanted[at + row + d] = FromBf16(from[(c.G + 1) * row + d]);
      }
    }
    HeadProblem p{.qkv = qkv.data(), .q = q.data(), .pool = pool.data(), .slots = to.data()};
    if (c.norm) p.q_scale = q_scale.data(), p.k_scale = k_scale.data();
    p.cos = cos.data(), p.sin = sin.data(), p.K = c.K, p.G = c.G, p.D = c.D, p.half = c.half, p.eps = 1e-6f, p.in_f32 = c.in_f32;
    p.first_slot = slots, p.slots_of_layer = slots;
    std::vector<bf16> q_alone(q.size()), pool_alone(pool);
    WriteHeads(p, 0, c.T);
    std::string name = "heads " + std::to_string(c.K) + "x" + std::to_string(c.D) + (c.size < 1 ? " denormal" : "");
    Check(name, q, wanted_q, allowed_q), Check(name + " pool", pool, wanted, allowed);
    p.q = q_alone.data(), p.pool = pool_alone.data();
    for (int64_t t = c.T - 1; t >= 0; --t) WriteHeads(p, t, t + 1);
    if (q_alone != q || pool_alone != pool) ++failures, std::printf("FAILED %s of a token alone\n", name.c_str());
    for (bf16 nan : {0x7fff, 0xffff, 0x7f81}) {
      if (!c.norm) break;
      qkv[5] = nan;
      WriteHeads(p, 0, 1);
      for (int64_t d = 0; d < row; ++d) {
        if (!std::isnan(FromBf16(q_alone[d]))) ++failures, std::printf("FAILED %s of NaN\n", name.c_str());
      }
    }
  }
}

// Weights that become int8 and int4: what their numbers and scales stand for is within half a step of each weight.
template <typename X>
void QuantizedWeights(const char* dtype) {
  for (Form form : {Form::kInt8, Form::kInt4}) {
    for (Order order : {Order::kRows, Order::kInterleaved}) {
      bool is_int4 = form == Form::kInt4, is_interleaved = order == Order::kInterleaved;
      int64_t N = is_interleaved ? 32 : 5, E = 96, S = is_int4 ? E / kPacked : 1, row = Bytes(form, E), group = E / S;
      Random random(N);
      std::vector<X> w(N * E);
      for (int64_t i = 0; i < N * E; ++i) {
        float x = i / E == 1 ? 0 : random.Number() * std::ldexp(1.0f, i / E % 9);
        if constexpr (sizeof(X) == 2) w[i] = ToBf16(x); else w[i] = x;
      }
      std::vector<uint8_t> values(N * row);
      std::vector<float> scales(N * S), y(N * E), in_rows(N * S);
      QuantizeRows<X>({w.data(), sizeof(X) == 4, N, E}, {form, order, values.data(), scales.data()}, 0, N);
      std::vector<double> wanted(N * E), allowed(N * E), wanted_scales(N * S), allowed_scales(N * S);
      for (int64_t i = 0; i < N * E; ++i) {
        int64_t n = i / E, e = i % E, half = is_interleaved ? 4 : 16;
        int64_t place = is_int4 ? e / (2 * half) * half + e % half : e;  // of the byte in its row
        if (is_interleaved) place = (place / 4 * 16 + n % 16) * 4 + place % 4;
        uint8_t byte = values[(is_interleaved ? n / 16 * 16 : n) * row + place];
        int number = is_int4 ? (e / half % 2 ? byte >> 4 : byte & 15) - 8 : is_interleaved ? byte - 128 : static_cast<int8_t>(byte);
        float scale = scales[is_interleaved ? (n / 16 * S + e / group) * 16 + n % 16 : n * S + e / group];
        y[i] = number * scale, wanted[i] = AsFloat(w[i]), allowed[i] = scale * 0.50001, in_rows[n * S + e / group] = scale;
        double& most = wanted_scales[n * S + e / group];
        most = std::max(most, std::fabs(wanted[i]) / (is_int4 ? 7 : 127));
      }
      for (int64_t i = 0; i < N * S; ++i) {
        if (wanted_scales[i] == 0) wanted_scales[i] = 1;
        allowed_scales[i] = wanted_scales[i] * 2e-7;
      }
      std::string name = std::string("quantize ") + (is_int4 ? "int4 " : "int8 ") + dtype + (is_interleaved ? " interleaved" : "");
      Check(name, y, wanted, allowed), Check(name + " scales", in_rows, wanted_scales, allowed_scales);
    }
  }
}

void LowRank() {
  for (auto [T, rank, N] : {std::array<int64_t, 3>{1, 8, 16}, {7, 16, 33}, {13, 24, 100}}) {
    Random random(T);
    auto h = random.Floats(T * rank, -1, 1), y = random.Floats(T * N, -1, 1);
    auto b = random.Bf16s(rank * N);
    std::vector<double> wanted(y.begin(), y.end()), allowed(T * N, 1e-5 * rank);
    std::vector<const float*> from;
    std::vector<float*> to;
    for (int64_t t = 0; t < T; ++t) {
      from.push_back(&h[t * rank]), to.push_back(&y[t * N]);
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t r = 0; r < rank; ++r) wanted[t * N + n] += h[t * rank + r] * FromBf16(b[r * N + n]);
      }
    }
    AddLowRank(from.data(), to.data(), T, b.data(), rank, N, N);
    Check("low_rank " + std::to_string(T) + "x" + std::to_string(rank) + "x" + std::to_string(N), y, wanted, allowed);
  }
}

// Rows of 3, 0 and 1 tokens: the first begins with zeros, the last reads one slot and writes another.
void GatedDelta() {
  for (auto [Hk, r, Dk, Dv, Dc] : {std::array<int64_t, 5>{1, 1, 8, 32, 1}, {2, 3, 24, 64, 1}, {2, 3, 24, 64, 24}}) {
    int64_t Hv = Hk * r, T = 4, slots = 3, size = Dk * Dv;
    Random random(Dk);
    auto q = random.Floats(T * Hk * Dk, -0.5, 0.5), k = random.Floats(T * Hk * Dk, -0.5, 0.5);
    auto v = random.Floats(T * Hv * Dv, -1, 1), decay = random.Floats(T * Hv * Dc, 0.3, 1), beta = random.Floats(T * Hv, 0, 1);
    auto pool = random.Floats(slots * Hv * size, -1, 1);
    std::vector<double> wanted(pool.begin(), pool.end()), outputs(T * Hv * Dv);
    std::vector<int32_t> starts{0, 3, 3, 4}, read{3, 0, 2}, write{0, 1, 1};
    for (int64_t row : {0, 2}) {
      for (int64_t h = 0; h < Hv; ++h) {
        std::vector<double> state(size);
        if (read[row] < slots) {
          for (int64_t i = 0; i < size; ++i) state[i] = pool[(read[row] * Hv + h) * size + i];
        }
        for (int64_t t = starts[row]; t < starts[row + 1]; ++t) {
          const float *of_k = &k[(t * Hk + h / r) * Dk], *of_q = &q[(t * Hk + h / r) * Dk];
          for (int64_t n = 0; n < Dv; ++n) {
            double error = v[(t * Hv + h) * Dv + n], o = 0;
            const float* of_decay = &decay[(t * Hv + h) * Dc];
            for (int64_t c = 0; c < Dk; ++c) error -= (state[c * Dv + n] *= of_decay[c % Dc]) * of_k[c];
            for (int64_t c = 0; c < Dk; ++c) o += (state[c * Dv + n] += of_k[c] * beta[t * Hv + h] * error) * of_q[c];
            outputs[(t * Hv + h) * Dv + n] = o;
          }
        }
        for (int64_t i = 0; i < size; ++i) wanted[(write[row] * Hv + h) * size + i] = state[i];
      }
    }
    std::vector<float> o(T * Hv * Dv);
    DeltaProblem p{.q = q.data(), .k = k.data(), .v = v.data(), .decay = decay.data(), .beta = beta.data()};
    p.pool = pool.data(), p.o = o.data(), p.starts = starts.data(), p.read = read.data(), p.write = write.data();
    p.slots = slots, p.Hk = Hk, p.Hv = Hv, p.Dk = Dk, p.Dv = Dv, p.Dc = Dc;
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t h = 0; h < Hv; ++h) {
        for (int64_t n = 0; n < Dv; n += kColumns) StepColumns(p, row, h, n);
      }
    }
    std::string name = "gated_delta " + std::to_string(Dk) + "x" + std::to_string(Dv) + (Dc > 1 ? " by channel" : "");
    Check(name, o, outputs, std::vector<double>(o.size(), 1e-5));
    Check(name + " state", pool, wanted, std::vector<double>(pool.size(), 1e-5));
  }
}

// Rows of 3, 0 and 1 tokens, as above, and states whose rows no tile divides.
void Mamba2() {
  for (auto [G, r, P, N] : {std::array<int64_t, 4>{1, 1, 4, 16}, {2, 3, 24, 48}}) {
    int64_t H = G * r, T = 4, slots = 3, size = P * N;
    Random random(N);
    auto x = random.Floats(T * H * P, -1, 1), decay = random.Floats(T * H, 0.3, 1);
    auto b = random.Floats(T * G * N, -0.5, 0.5), c = random.Floats(T * G * N, -0.5, 0.5);
    auto pool = random.Floats(slots * H * size, -1, 1);
    std::vector<double> wanted(pool.begin(), pool.end()), outputs(T * H * P);
    std::vector<int32_t> starts{0, 3, 3, 4}, read{3, 0, 2}, write{0, 1, 1};
    for (int64_t row : {0, 2}) {
      for (int64_t h = 0; h < H; ++h) {
        std::vector<double> state(size);
        if (read[row] < slots) {
          for (int64_t i = 0; i < size; ++i) state[i] = pool[(read[row] * H + h) * size + i];
        }
        for (int64_t t = starts[row]; t < starts[row + 1]; ++t) {
          const float *of_b = &b[(t * G + h / r) * N], *of_c = &c[(t * G + h / r) * N];
          for (int64_t i = 0; i < P; ++i) {
            double y = 0, of_x = x[(t * H + h) * P + i];
            for (int64_t n = 0; n < N; ++n) {
              double& s = state[i * N + n];
              y += (s = s * decay[t * H + h] + of_x * of_b[n]) * of_c[n];
            }
            outputs[(t * H + h) * P + i] = y;
          }
        }
        for (int64_t i = 0; i < size; ++i) wanted[(write[row] * H + h) * size + i] = state[i];
      }
    }
    std::vector<float> y(T * H * P);
    ScanProblem p{.x = x.data(), .decay = decay.data(), .b = b.data(), .c = c.data()};
    p.pool = pool.data(), p.y = y.data(), p.starts = starts.data(), p.read = read.data(), p.write = write.data();
    p.slots = slots, p.H = H, p.G = G, p.P = P, p.N = N;
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t i = 0; i < P; i += kStateRows) StepRows(p, row, h, i);
      }
    }
    std::string name = "mamba2 " + std::to_string(P) + "x" + std::to_string(N);
    Check(name, y, outputs, std::vector<double>(y.size(), 1e-5));
    Check(name + " state", pool, wanted, std::vector<double>(pool.size(), 1e-5));
  }
}

// What a row of x is in a product of integers.
std::vector<double> Rounded(const std::vector<bf16>& x, int64_t E, int64_t block, float most) {
  std::vector<double> rounded(x.size());
  for (size_t row = 0; row < x.size(); row += E) {
    for (int64_t first = 0; first < E; first += block) {
      float largest = 0;
      for (int64_t e = first; e < std::min(E, first + block); ++e) largest = std::max(largest, std::fabs(FromBf16(x[row + e])));
      for (int64_t e = first; e < std::min(E, first + block); ++e) {
        float inverse = most / largest;
        rounded[row + e] = std::nearbyint(FromBf16(x[row + e]) * inverse) * static_cast<double>(largest / most);
      }
    }
  }
  return rounded;
}

const char* const kNames[] = {"plain", "int8", "int16"};  // of activations

// Few rows of x have the bits in a product that they have among all, y.
void CheckFewRows(ffi::ThreadPool& pool, const std::vector<bf16>& x, const Quantized& w, Activations activations,
                  const std::vector<float>& y) {
  int64_t T = y.size() / w.N;
  for (int64_t t : {int64_t{0}, T / 2, T - 1}) {
    for (int64_t rows : {1, 2, 3, 4, 15, 16, 17, 32}) {
      if (rows > T - t) break;
      std::vector<float> few(rows * w.N);
      Multiply(pool, &x[t * w.E], w, activations, few.data(), rows);
      if (std::memcmp(few.data(), &y[t * w.N], few.size() * sizeof(float)) != 0 && ++failures < 20) {
        std::printf("FAILED quantized %s: row %lld has other bits among %lld\n", kNames[static_cast<int>(activations)],
                    static_cast<long long>(t), static_cast<long long>(rows));
      }
    }
  }
}

void QuantizedProducts(ffi::ThreadPool& pool) {
  const char* forms[] = {"int8", "int4", "fp8"};
  for (Form form : {Form::kInt8, Form::kInt4, Form::kE4m3}) {
    for (Scales kind : {Scales::kRow, Scales::kGroups, Scales::kZeros}) {
      if ((kind == Scales::kRow && form == Form::kInt4) || (kind == Scales::kZeros && form != Form::kInt4)) continue;
      for (auto [T, N, E] : kShapes) {
        Random random(T * 3 + N);
        int64_t S = kind == Scales::kRow ? 1 : E % 96 == 0 ? E / 96 : E / 32, group = E / S;
        if (kind != Scales::kRow && S == 1 && form != Form::kInt4) continue;  // that is a scale a row
        auto x = random.Bf16s(T * E);
        std::vector<uint8_t> values(Bytes(form, N * E));
        for (uint8_t& value : values) {
          value = random.Bits();
          if (form == Form::kE4m3 && (value & 0x7f) == 0x7f) value = 0;  // no number
        }
        auto scales = random.Floats(N * S, 0.01f, 0.1f), zeros = random.Floats(N * S, -7, 7);
        for (float& zero : zeros) zero = std::nearbyint(zero);
        Quantized w{form, values.data(), scales.data(), kind == Scales::kZeros ? zeros.data() : nullptr, N, E, S};
        auto weight = [&, N = N, E = E](int64_t n, int64_t e) -> double {
          int64_t i = n * E + e, s = n * S + e / group;
          double value;
          if (form == Form::kInt8) {
            value = static_cast<int8_t>(values[i]);
          } else if (form == Form::kE4m3) {
            value = FromE4m3(values[i]);
          } else {
            uint8_t byte = values[i / 32 * 16 + i % 16];
            value = (i % 32 < 16 ? byte & 15 : byte >> 4) - 8.0 - (kind == Scales::kZeros ? zeros[s] : 0.0f);
          }
          return value * scales[s];
        };
        auto in_bf16 = [&](int64_t n, int64_t e) -> double {
          return w.Kind() == Scales::kRow ? weight(n, e) : FromBf16(ToBf16(static_cast<float>(weight(n, e))));
        };
        for (Activations activations : {Activations::kPlain, Activations::kInt8, Activations::kInt16}) {
          std::vector<double> taken(x.size());
          for (size_t i = 0; i < x.size(); ++i) taken[i] = FromBf16(x[i]);
          if (form != Form::kE4m3 && activations == Activations::kInt8) taken = Rounded(x, E, 32, 127);
          if (form != Form::kE4m3 && activations == Activations::kInt16) taken = Rounded(x, E, 256, 32767);
          auto of_x = [&, E = E](int64_t t, int64_t e) { return taken[t * E + e]; };
          std::vector<float> y(T * N);
          Multiply(pool, x.data(), w, activations, y.data(), T);
          Product exact = activations == Activations::kPlain ? Product(T, N, E, of_x, in_bf16) : Product(T, N, E, of_x, weight);
          Check(std::string("quantized ") + kNames[static_cast<int>(activations)] + " " + forms[static_cast<int>(form)] +
                    (kind == Scales::kRow      ? " row "
                     : kind == Scales::kGroups ? " groups "
                                               : " zeros ") +
                    std::to_string(T) + "x" + std::to_string(N) + "x" + std::to_string(E),
                y, exact.y, exact.allowed);
          CheckFewRows(pool, x, w, activations, y);
        }
      }
    }
  }
}

// Numbers so small that products and sums of some are denormal: levels that make zeros of these do so for any number of rows.
void SmallProducts(ffi::ThreadPool& pool) {
  constexpr int64_t T = 20, N = 300, E = 160;  // so many outputs that an item of work has several groups of them
  Random random(E);
  auto x = random.Bf16s(T * E, 0x1p-127f);
  std::vector<int8_t> values(N * E);
  for (int8_t& value : values) value = random.Bits() % 7 - 3;
  std::vector<float> scales(N, 1), y(T * N);
  Quantized w{Form::kInt8, values.data(), scales.data(), nullptr, N, E, 1};
  auto of_x = [&](int64_t t, int64_t e) -> double { return FromBf16(x[t * E + e]); };
  Product exact(T, N, E, of_x, [&](int64_t n, int64_t e) -> double { return values[n * E + e]; });
  Multiply(pool, x.data(), w, Activations::kPlain, y.data(), T);
  Check("quantized plain int8 small", y, exact.y, std::vector<double>(y.size(), 4 * E * 0x1p-126));
  CheckFewRows(pool, x, w, Activations::kPlain, y);
}

// Rows of x that are few beside so many outputs that an item of work has several groups of them then too; then ones with chunks of
// inputs that are whole.
void WideProducts(ffi::ThreadPool& pool) {
  constexpr int64_t T = 33;
  for (auto [N, E] : {std::array<int64_t, 2>{1100, 160}, {300, 256}}) {
    for (auto [form, kind] : {std::pair{Form::kInt8, Scales::kGroups}, {Form::kInt4, Scales::kGroups}, {Form::kInt4, Scales::kZeros},
                              {Form::kE4m3, Scales::kRow}}) {
      Random random(N);
      auto x = random.Bf16s(T * E);
      std::vector<uint8_t> values(Bytes(form, N * E));
      for (uint8_t& value : values) value = random.Bits() & (form == Form::kE4m3 ? 0xf7 : 0xff);  // 0x7f is no number of fp8
      auto scales = random.Floats(N * E / kPacked, 0.01f, 0.1f), zeros = random.Floats(N * E / kPacked, -7, 7);
      Quantized w{form, values.data(), scales.data(), kind == Scales::kZeros ? zeros.data() : nullptr, N, E, kind == Scales::kRow ? 1 : E / kPacked};
      std::vector<float> y(T * N);
      Multiply(pool, x.data(), w, Activations::kPlain, y.data(), T);
      CheckFewRows(pool, x, w, Activations::kPlain, y);
    }
  }
}

// What Order::kInterleaved makes of [N, E] values and [N, S] numbers.
std::vector<uint8_t> InterleavedValues(Form form, const std::vector<uint8_t>& rows, int64_t N, int64_t E) {
  std::vector<uint8_t> values(rows.size());
  for (int64_t n = 0; n < N; ++n) {
    uint8_t* group = &values[n / kInterleaved * kInterleaved * Bytes(form, E)];
    for (int64_t e = 0; e < E; ++e) {
      if (form == Form::kInt8) {
        group[e / 4 * 64 + n % kInterleaved * 4 + e % 4] = rows[n * E + e] + 128;
      } else {
        uint8_t byte = rows[(n * E + e) / 32 * 16 + e % 16], number = e % 32 < 16 ? byte & 15 : byte >> 4;
        group[e / 8 * 64 + n % kInterleaved * 4 + e % 4] |= e % 8 < 4 ? number : number << 4;
      }
    }
  }
  return values;
}

std::vector<float> InterleavedNumbers(const std::vector<float>& rows, int64_t N, int64_t S) {
  std::vector<float> numbers(rows.size());
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t s = 0; s < S; ++s) {
      numbers[(n / kInterleaved * S + s) * kInterleaved + n % kInterleaved] = rows[n * S + s];
    }
  }
  return numbers;
}

// Of activations in 8 bits interleaved weights have the bits of those in rows; of 16 bits they are held to the definition.
void InterleavedProducts(ffi::ThreadPool& pool) {
  const int64_t shapes[][3] = {{1, 16, 32}, {2, 32, 64}, {4, 16, 96}, {5, 48, 160}, {7, 16, 544}, {70, 32, 288}};
  for (Form form : {Form::kInt8, Form::kInt4}) {
    for (Scales kind : {Scales::kRow, Scales::kGroups, Scales::kZeros}) {
      if ((kind == Scales::kRow && form == Form::kInt4) || (kind == Scales::kZeros && form != Form::kInt4)) continue;
      for (auto [T, N, E] : shapes) {
        Random random(T * 5 + N);
        int64_t S = kind == Scales::kRow || (E == 64 && form == Form::kInt4) ? 1 : E % 96 == 0 ? E / 96 : E / 32;
        if (kind != Scales::kRow && S == 1 && form != Form::kInt4) continue;  // that is a scale a row
        auto x = random.Bf16s(T * E);
        std::vector<uint8_t> rows(Bytes(form, N * E));
        for (uint8_t& value : rows) value = random.Bits();
        auto scales = random.Floats(N * S, 0.01f, 0.1f), zeros = random.Floats(N * S, -7, 7);
        auto weight = [&, N = N, E = E](int64_t n, int64_t e) {
          int64_t i = n * E + e, s = n * S + e / (E / S);
          if (form == Form::kInt8) return static_cast<int8_t>(rows[i]) * static_cast<double>(scales[s]);
          uint8_t byte = rows[i / 32 * 16 + i % 16];
          double number = (i % 32 < 16 ? byte & 15 : byte >> 4) - 8.0 - (kind == Scales::kZeros ? zeros[s] : 0.0f);
          return number * scales[s];
        };
        auto values = InterleavedValues(form, rows, N, E);
        auto of_scales = InterleavedNumbers(scales, N, S), of_zeros = InterleavedNumbers(zeros, N, S);
        bool has_zeros = kind == Scales::kZeros;
        Quantized in_rows{form, rows.data(), scales.data(), has_zeros ? zeros.data() : nullptr, N, E, S, Order::kRows};
        Quantized w{form, values.data(), of_scales.data(), has_zeros ? of_zeros.data() : nullptr, N, E, S, Order::kInterleaved};
        std::string name = std::string(form == Form::kInt8 ? "int8" : "int4") + (has_zeros ? " zeros " : kind == Scales::kRow ? " row " : " groups ") +
                           std::to_string(T) + "x" + std::to_string(N) + "x" + std::to_string(E);
        std::vector<float> y(T * N), others(T * N);
        if (TakesInterleaved(Activations::kInt8)) {
          Multiply(pool, x.data(), w, Activations::kInt8, y.data(), T);
          Multiply(pool, x.data(), in_rows, Activations::kInt8, others.data(), T);
          if (std::memcmp(y.data(), others.data(), y.size() * sizeof(float)) != 0) {
            ++failures, std::printf("FAILED interleaved int8 %s: not the bits of rows\n", name.c_str());
          }
        }
        if (!TakesInterleaved(Activations::kInt16)) ++failures, std::printf("FAILED interleaved int16: not taken\n");
        auto taken = Rounded(x, E, 256, 32767);
        Product exact(T, N, E, [&, E = E](int64_t t, int64_t e) { return taken[t * E + e]; }, weight);
        Multiply(pool, x.data(), w, Activations::kInt16, y.data(), T);
        Check("quantized int16 interleaved " + name, y, exact.y, exact.allowed);
      }
    }
  }
}

struct AttentionCase {
  int64_t context, queries, P, H, K, D, V, window;
  float soft_cap;
  bool sinks, latent = false;  // latent: K parts of the query heads
  bool largest = false;        // queries and keys of int8 whose products are as large as can be, of one sign in a slot
  bool tiny = false;           // values of bf16 that make denormal numbers of most products with weights
  bool growing = false;        // keys of bf16 that are larger after the first span, so that largest scores grow
};

template <typename Slot>
void Attention(const char* pool_name, const AttentionCase& c, bool decode) {
  Random random(c.context + c.D);
  int64_t M = (c.context + c.P - 1) / c.P, N = M + 2, head_size = c.latent ? c.D : c.D + c.V, row = c.latent ? head_size : c.K * head_size;
  auto q = random.Bf16s(c.queries * c.H * c.D);
  std::vector<Slot> pool(N * c.P * row);
  std::vector<float> scales = random.Floats(N * c.P * 2 * c.K, 0.01f, 0.02f), sinks = random.Floats(c.H, -3, 3);
  for (Slot& x : pool) {
    if constexpr (sizeof(Slot) == 2) {
      x = ToBf16(random.Number());
    } else {
      uint8_t bits = random.Bits();
      if (std::is_same_v<Slot, E4m3> && (bits & 0x7f) == 0x7f) bits = 0;
      std::memcpy(&x, &bits, 1);
    }
  }
  if (c.largest) {
    std::fill(q.begin(), q.end(), ToBf16(-0x1.fep-4f));
    for (int64_t slot = 0; slot < N * c.P * c.K; ++slot) {
      uint8_t bits = random.Bits() % 2 ? 0x80 : 0x7f;
      std::memset(&pool[slot * head_size], bits, c.D);
    }
  }
  if constexpr (std::is_same_v<Slot, bf16>) {
    for (int64_t i = 0; c.tiny && i < N * c.P * row; ++i) {
      if (i % head_size >= c.D) pool[i] = ToBf16(FromBf16(pool[i]) * 0x1p-122f);
    }
    for (int64_t i = 0; c.growing && i < (N - kSpan / c.P) * c.P * row; ++i) {  // block i of the pool is block N - 1 - i of the row
      if (i % head_size < c.D) pool[i] = ToBf16(FromBf16(pool[i]) * 4);
    }
  }
  auto value = [&](int64_t index) -> double {  // of an element of the pool
    double scale = sizeof(Slot) == 2 ? 1.0 : scales[2 * (index / head_size) + (index % head_size >= (c.latent ? c.V : c.D))];
    if constexpr (std::is_same_v<Slot, bf16>) return FromBf16(pool[index]);
    if constexpr (std::is_same_v<Slot, int8_t>) return pool[index] * scale;
    if constexpr (std::is_same_v<Slot, E4m3>) return FromE4m3(pool[index].bits) * scale;
  };
  std::vector<int32_t> table(M), contexts{static_cast<int32_t>(c.context)}, starts{0, static_cast<int32_t>(c.queries)};
  for (int64_t i = 0; i < M; ++i) table[i] = N - 1 - i;
  std::vector<bf16> o(c.queries * c.H * c.V);
  Problem p;
  p.q = q.data(), p.pool = pool.data(), p.scales = scales.data(), p.o = o.data(), p.table = table.data();
  p.contexts = contexts.data(), p.starts = starts.data(), p.sinks = c.sinks ? sinks.data() : nullptr;
  p.T = c.queries, p.S = 1, p.M = M, p.H = c.H, p.K = c.K, p.G = c.H / c.K, p.D = c.D, p.V = c.V, p.P = c.P;
  p.window = c.window, p.scale = 1 / std::sqrt(static_cast<float>(c.D)), p.soft_cap = c.soft_cap, p.decode = decode, p.latent = c.latent;
  auto attend = std::is_same_v<Slot, bf16> ? &Attend : std::is_same_v<Slot, int8_t> ? &AttendInt8 : &AttendE4m3;
  int64_t position = c.context - c.queries, begin = c.window > 0 ? std::max<int64_t>(0, position + 1 - c.window) : 0;
  for (int64_t head = 0; head < c.K; head += decode ? c.K : 1) {
    Item item{0, 0, c.queries, position, begin, c.context, head, decode ? c.K : 1}, next = item;
    attend(p, item, &next);
  }
  if (decode && c.context - begin > kSpan) {  // the same in spans, the last one first
    std::vector<bf16> whole = o;
    int64_t first = begin / kSpan, count = (c.context + kSpan - 1) / kSpan - first;
    std::vector<float> sums(count * c.H * (kSumsBefore + c.V));
    Spans spans{sums.data(), count, {count}};
    for (int64_t span = count - 1; span >= 0; --span) {
      int64_t from = std::max(begin, (first + span) * kSpan), to = std::min(c.context, (first + span + 1) * kSpan);
      attend(p, {0, 0, 1, position, from, to, 0, c.K, &spans, span}, nullptr);
    }
    if (o != whole) ++failures, std::printf("FAILED attention in spans\n");
  }
  if (decode && !std::is_same_v<Slot, E4m3>) {  // a head alone has the bits it has among others
    std::vector<bf16> whole = o;
    for (int64_t head = 0; head < c.K; ++head) attend(p, {0, 0, 1, position, begin, c.context, head, 1}, nullptr);
    if (o != whole) ++failures, std::printf("FAILED attention of a head alone\n");
  }
  if (!decode) {  // a query alone has the bits it has among others
    std::vector<bf16> whole = o;
    for (int64_t t : {int64_t{0}, c.queries / 2, c.queries - 1}) {
      int64_t from = c.window > 0 ? std::max<int64_t>(0, position + t + 1 - c.window) : 0;
      for (int64_t head = 0; head < c.K; ++head) attend(p, {0, t, 1, position + t, from, position + t + 1, head, 1}, nullptr);
    }
    if (o != whole) ++failures, std::printf("FAILED attention of a query alone\n");
  }
  std::vector<double> wanted(o.size()), allowed(o.size());
  for (int64_t t = 0; t < c.queries; ++t) {
    for (int64_t h = 0; h < c.H; ++h) {
      int64_t last = position + t, first = c.window > 0 ? std::max<int64_t>(0, last + 1 - c.window) : 0, k = h / p.G;
      auto slot = [&](int64_t s) { return (table[s / c.P] * c.P + s % c.P) * row + k * p.Apart(); };
      std::vector<double> scores;
      double top = c.sinks ? sinks[h] : -1e30;
      for (int64_t s = first; s <= last; ++s) {
        double score = 0;
        for (int64_t d = 0; d < c.D; ++d) score += FromBf16(q[(t * c.H + h) * c.D + d]) * value(slot(s) + d);
        score *= p.scale;
        if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
        scores.push_back(score), top = std::max(top, score);
      }
      double total = c.sinks ? std::exp(sinks[h] - top) : 0;
      for (double& score : scores) score = std::exp(score - top), total += score;
      for (int64_t d = 0; d < c.V; ++d) {
        double sum = 0, size = 0;
        for (int64_t s = first; s <= last; ++s) {
          double part = scores[s - first] / total * value(slot(s) + p.ValueAt() + d);
          sum += part, size += std::fabs(part);
        }
        // Weights and results may be rounded to bf16.
        wanted[(t * c.H + h) * c.V + d] = sum, allowed[(t * c.H + h) * c.V + d] = size * 0x1p-7 + 1e-5;
      }
    }
  }
  Check(std::string("attention ") + pool_name + (decode ? " decode " : " prefill ") + std::to_string(c.context) + " " +
            std::to_string(c.D) + " " + std::to_string(c.V) + " " + std::to_string(p.G),
        o, wanted, allowed);
}

void AttentionCases() {
  const AttentionCase cases[] = {{1, 1, 16, 2, 2, 32, 32, 0, 0, false},     {200, 1, 16, 8, 2, 64, 64, 0, 0, true},
                                 {130, 1, 64, 10, 2, 96, 96, 70, 0, false}, {65, 1, 8, 16, 1, 128, 128, 0, 5, false},
                                 {70, 9, 16, 4, 2, 64, 64, 0, 0, true},     {140, 16, 32, 6, 2, 96, 96, 50, 3, false},
                                 {150, 1, 16, 6, 3, 192, 128, 0, 0, true},  {90, 11, 16, 6, 3, 192, 128, 40, 0, true},
                                 {70, 1, 16, 4, 2, 32, 96, 0, 0, false},    {70, 5, 16, 4, 2, 32, 96, 0, 0, false},
                                 {600, 1, 16, 4, 2, 64, 64, 0, 0, true},    {700, 1, 64, 8, 2, 96, 96, 330, 0, false},
                                 {520, 9, 16, 6, 2, 64, 64, 260, 0, true},  {300, 70, 64, 6, 2, 64, 96, 0, 0, false},
                                 {290, 49, 16, 4, 2, 64, 64, 0, 0, false},  {530, 1, 16, 10, 2, 96, 64, 0, 0, false, true},
                                 {150, 1, 16, 10, 2, 96, 64, 0, 0, false, true}, {90, 3, 16, 10, 2, 96, 64, 0, 0, false, true},
                                 {130, 1, 16, 5, 5, 64, 64, 0, 0, false},    {300, 1, 16, 7, 1, 256, 256, 0, 0, false},
                                 {75, 1, 16, 16, 2, 32, 32, 60, 0, true},    {9, 1, 8, 6, 2, 32, 64, 0, 0, false},
                                 {620, 45, 8, 4, 2, 64, 64, 300, 4, true},  {600, 1, 16, 24, 1, 64, 64, 0, 0, false},
                                 {330, 1, 16, 32, 4, 64, 64, 0, 0, true},
                                 {330, 1, 16, 18, 9, 128, 128, 200, 0, false}};
  for (const AttentionCase& c : cases) {
    for (bool decode : {false, true}) {
      if (decode && c.queries > 1) continue;
      Attention<bf16>("bf16", c, decode), Attention<int8_t>("int8", c, decode), Attention<E4m3>("fp8", c, decode);
    }
  }
  for (int64_t G : {1, 2, 3}) Attention<bf16>("bf16 tiny", {90, 9, 16, G, 1, 64, 160, 0, 0, false, false, false, true}, false);
  Attention<bf16>("bf16 growing", {330, 49, 16, 4, 2, 64, 64, 0, 0, false, false, false, false, true}, false);
  // Sums of products that fill 32 bits, and head dimensions whose would overflow them.
  for (int64_t D : {512, 544, 1056}) {
    for (bool decode : {false, true}) Attention<int8_t>("int8", {70, 1, 16, 3, 1, D, 32, 0, 0, false, false, true}, decode);
    Attention<int8_t>("int8", {70, 5, 16, 2, 1, D, 32, 0, 0, false, false, true}, false);
  }
}
}  // namespace
}  // namespace jpaged

int main() {
#ifdef __AMX_TILE__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // Linux gives a process tiles that asks for them
  syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#endif
  jpaged::Zeros();
  {
    xla::ffi::ThreadPool pool;
    jpaged::LinearCases(pool), jpaged::Panels(pool), jpaged::GroupCases(pool);
    jpaged::QuantizedProducts(pool), jpaged::SmallProducts(pool), jpaged::WideProducts(pool), jpaged::InterleavedProducts(pool), jpaged::FunctionCases(pool), jpaged::ActivationCases(pool), jpaged::MlpCases(pool);
  }
  jpaged::QuantizedWeights<jpaged::bf16>("bf16"), jpaged::QuantizedWeights<float>("f32");
  jpaged::LowRank(), jpaged::Norms(), jpaged::HeadWrites(), jpaged::GatedDelta(), jpaged::Mamba2(), jpaged::AttentionCases();
  if (jpaged::failures > 0) std::printf("%d elements are wrong\n", jpaged::failures);
  return jpaged::failures > 0;
}
