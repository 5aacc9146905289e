// The registers of NEON by the names that every level's lanes.h has (struct Lanes). Each is two of the processor's, of which
// it has 32, as AVX2 has 16 of twice the size: kernels have the same tiles, and sum in the same order. Of ARMv8-A alone: bf16
// becomes f32, there is no bfdot and no dotprod.
#pragma once

#include <arm_neon.h>

#include "../quantized.h"

namespace jpaged::neon {

// 8 f32 in two registers, or as many bits of integers.
struct Lanes {
  static constexpr int64_t kCount = 8;
  struct Floats {
    float32x4_t low, high;
  };
  struct Mask {
    uint32x4_t low, high;
  };
  struct Integers {  // 8 of 32 bits
    int32x4_t low, high;
  };
  struct Words {  // 16 of 16 bits
    uint16x8_t low, high;
  };
  struct Bytes {  // 32 of 8 bits
    int8x16_t low, high;
  };

  static Floats Zero() { return Set(0.0f); }
  static Floats Set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static Floats Load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
  static void Store(float* to, Floats x) { vst1q_f32(to, x.low), vst1q_f32(to + 4, x.high); }
  static void StoreSix(float* to, Floats x) { vst1q_f32(to, x.low), vst1_f32(to + 4, vget_low_f32(x.high)); }  // the first six
  static Floats Add(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static Floats Sub(Floats a, Floats b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static Floats Mul(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static Floats Div(Floats a, Floats b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  static Floats Sqrt(Floats x) { return {vsqrtq_f32(x.low), vsqrtq_f32(x.high)}; }
  static Floats Max(Floats a, Floats b) { return {vmaxnmq_f32(a.low, b.low), vmaxnmq_f32(a.high, b.high)}; }
  static Floats Fma(Floats a, Floats b, Floats c) {  // a * b + c
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  static void AddProduct(Floats& sum, Floats a, Floats b) { sum = Fma(a, b, sum); }
  static Floats Fnma(Floats a, Floats b, Floats c) {  // c - a * b
    return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
  }

  // y * 2^n where the mask is set, else 0; moved: n plus 1.5 * 2^23.
  static Floats TimesPower(Mask mask, Floats y, Floats moved) {
    auto power = [](float32x4_t moved) {
      return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(moved), 23), vdupq_n_s32(127 << 23)));
    };
    return OrZero(mask, Mul(y, {power(moved.low), power(moved.high)}));
  }

  // Where x is not below y, or is NaN.
  static Mask NotBelow(Floats x, Floats y) {
    return {vmvnq_u32(vcltq_f32(x.low, y.low)), vmvnq_u32(vcltq_f32(x.high, y.high))};
  }

  static Floats OrZero(Mask mask, Floats x) {
    auto keep = [](uint32x4_t mask, float32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x))); };
    return {keep(mask.low, x.low), keep(mask.high, x.high)};
  }

  // a * b where the mask is set, else `other`.
  static Floats MulOr(Floats other, Mask mask, Floats a, Floats b) {
    Floats product = Mul(a, b);
    return {vbslq_f32(mask.low, product.low, other.low), vbslq_f32(mask.high, product.high, other.high)};
  }

  // Element i is the sum of the lanes of the i-th.
  static void PutSums(float* to, Floats a0, Floats a1, Floats a2, Floats a3) {
    float32x4_t low = vpaddq_f32(vpaddq_f32(a0.low, a1.low), vpaddq_f32(a2.low, a3.low));
    float32x4_t high = vpaddq_f32(vpaddq_f32(a0.high, a1.high), vpaddq_f32(a2.high, a3.high));
    vst1q_f32(to, vaddq_f32(low, high));
  }

  // The same of integers, as f32.
  static void PutSums(float* to, Integers a0, Integers a1, Integers a2, Integers a3) {
    int32x4_t low = vpaddq_s32(vpaddq_s32(a0.low, a1.low), vpaddq_s32(a2.low, a3.low));
    int32x4_t high = vpaddq_s32(vpaddq_s32(a0.high, a1.high), vpaddq_s32(a2.high, a3.high));
    vst1q_f32(to, vcvtq_f32_s32(vaddq_s32(low, high)));
  }

  // Lane i of to[j] is the j-th of rows[i].
  static void Turn(const float* const (&rows)[8], Floats (&to)[8]) {
    auto turned = [&](int first, int j, float32x4_t (&to)[4]) {  // those of 4 rows
      float32x4_t a = vld1q_f32(rows[first] + j), b = vld1q_f32(rows[first + 1] + j);
      float32x4_t c = vld1q_f32(rows[first + 2] + j), d = vld1q_f32(rows[first + 3] + j);
      float32x4_t ac = vzip1q_f32(a, c), bd = vzip1q_f32(b, d);
      to[0] = vzip1q_f32(ac, bd), to[1] = vzip2q_f32(ac, bd);
      ac = vzip2q_f32(a, c), bd = vzip2q_f32(b, d);
      to[2] = vzip1q_f32(ac, bd), to[3] = vzip2q_f32(ac, bd);
    };
    for (int j = 0; j < 8; j += 4) {
      float32x4_t low[4], high[4];
      turned(0, j, low), turned(4, j, high);
      for (int k = 0; k < 4; ++k) to[j + k] = {low[k], high[k]};
    }
  }

  // a and b become their lower halves and their upper halves.
  static void TradeHalves(Floats& a, Floats& b) { std::swap(a.high, b.low); }

  static float Sum(Floats x) {
    float32x4_t pairs = vpaddq_f32(x.low, x.high);
    return vaddvq_f32(vpaddq_f32(pairs, vdupq_n_f32(0.0f)));
  }

  // The second half of the lanes is added to the first one until there is one.
  static float SumOfHalves(Floats x) {
    float32x4_t four = vaddq_f32(x.low, x.high);
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }

  // Element i is that sum of the i-th.
  static void PutSumsOfHalves(float* to, Floats a0, Floats a1, Floats a2, Floats a3) {
    auto halves = [](Floats a, Floats b) {
      float32x4_t x = vaddq_f32(a.low, a.high), y = vaddq_f32(b.low, b.high);
      return vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)), vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
    };
    vst1q_f32(to, vpaddq_f32(halves(a0, a1), halves(a2, a3)));
  }

  static float Largest(Floats x) { return vmaxnmvq_f32(vmaxnmq_f32(x.low, x.high)); }

  // Writes x, and returns what was written.
  static Floats Put(float* to, Floats x) { return Store(to, x), x; }

  // Numbers in [low, high).
  class Range {
   public:
    Range(int64_t low, int64_t high) : low_(vdupq_n_s32(low)), high_(vdupq_n_s32(high)) {}
    Mask Lanes(int i) const {  // of lanes that are 8 i, 8 i + 1, ...
      return {Of(kCount * i), Of(kCount * i + 4)};
    }

   private:
    uint32x4_t Of(int first) const {
      const int32x4_t lanes = {0, 1, 2, 3};
      int32x4_t number = vaddq_s32(lanes, vdupq_n_s32(first));
      return vandq_u32(vcgeq_s32(number, low_), vcltq_s32(number, high_));
    }
    int32x4_t low_, high_;
  };

  // --- bf16: 16 become those in even places and those in odd ones, as on AVX2.

  static Words LoadWords(const void* from) {
    const uint16_t* words = static_cast<const uint16_t*>(from);
    return {vld1q_u16(words), vld1q_u16(words + 8)};
  }
  static Floats Even(Words x) {
    auto even = [](uint16x8_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(x), 16)); };
    return {even(x.low), even(x.high)};
  }
  static Floats Odd(Words x) {
    auto odd = [](uint16x8_t x) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(x), vdupq_n_u32(0xffff0000))); };
    return {odd(x.low), odd(x.high)};
  }
  static void EvenOdd(const bf16* from, Floats& even, Floats& odd) {
    Words words = LoadWords(from);
    even = Even(words), odd = Odd(words);
  }

  // Lane i of pairs[k] has the inputs e + 2 k and e + 2 k + 1 of row i.
  static void PairsOfRows(const bf16* const (&rows)[kCount], int64_t e, Words (&pairs)[kCount / 2]) {
    auto turned = [&](int first, uint16x8_t (&to)[4]) {  // those of 4 rows
      auto load = [&](int i) { return vreinterpretq_u32_u16(vld1q_u16(rows[first + i] + e)); };
      auto low = [](uint32x4_t a, uint32x4_t b) { return vreinterpretq_u64_u32(vzip1q_u32(a, b)); };
      auto high = [](uint32x4_t a, uint32x4_t b) { return vreinterpretq_u64_u32(vzip2q_u32(a, b)); };
      uint32x4_t a = load(0), b = load(1), c = load(2), d = load(3);
      uint64x2_t ab = low(a, b), cd = low(c, d);
      to[0] = vreinterpretq_u16_u64(vzip1q_u64(ab, cd)), to[1] = vreinterpretq_u16_u64(vzip2q_u64(ab, cd));
      ab = high(a, b), cd = high(c, d);
      to[2] = vreinterpretq_u16_u64(vzip1q_u64(ab, cd)), to[3] = vreinterpretq_u16_u64(vzip2q_u64(ab, cd));
    };
    uint16x8_t low[4], high[4];
    turned(0, low), turned(4, high);
    for (int k = 0; k < 4; ++k) pairs[k] = {low[k], high[k]};
  }

  // Rounds to the nearest bf16, the even one of two; NaN stays NaN.
  static void PutEvenOdd(bf16* to, Floats even, Floats odd) {
    auto both = [](float32x4_t even, float32x4_t odd) {
      return vtrn2q_u16(vreinterpretq_u16_u32(Rounded(even)), vreinterpretq_u16_u32(Rounded(odd)));
    };
    vst1q_u16(to, both(even.low, odd.low)), vst1q_u16(to + 8, both(even.high, odd.high));
  }

  // The same of 16 in their own order.
  static void PutInOrder(bf16* to, Floats first, Floats second) {
    auto both = [](Floats x) {
      return vuzp2q_u16(vreinterpretq_u16_u32(Rounded(x.low)), vreinterpretq_u16_u32(Rounded(x.high)));
    };
    vst1q_u16(to, both(first)), vst1q_u16(to + 8, both(second));
  }

  // Rounds 8 numbers. A NaN must end in 16 zeros, as those that come of bf16 do: it stays NaN.
  static Floats RoundedToBf16(Floats x) {
    auto rounded = [](float32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(RoundedUp(x), vdupq_n_u32(0xffff0000))); };
    return {rounded(x.low), rounded(x.high)};
  }
  static void PutRounded(bf16* to, Floats x) {
    vst1q_u16(to, vuzp2q_u16(vreinterpretq_u16_u32(RoundedUp(x.low)), vreinterpretq_u16_u32(RoundedUp(x.high))));
  }

  // Writes 16 numbers of even places and of odd ones, rounded in the same way.
  static void PutRounded(bf16* to, Floats even, Floats odd) {
    auto both = [](float32x4_t even, float32x4_t odd) {
      return vtrn2q_u16(vreinterpretq_u16_u32(RoundedUp(even)), vreinterpretq_u16_u32(RoundedUp(odd)));
    };
    vst1q_u16(to, both(even.low, odd.low)), vst1q_u16(to + 8, both(even.high, odd.high));
  }

  // Writes numbers of even places and of odd ones, which bf16 holds.
  static void PutExact(bf16* to, Floats even, Floats odd) {
    auto both = [](float32x4_t even, float32x4_t odd) { return vtrn2q_u16(vreinterpretq_u16_f32(even), vreinterpretq_u16_f32(odd)); };
    vst1q_u16(to, both(even.low, odd.low)), vst1q_u16(to + 8, both(even.high, odd.high));
  }

  // Puts numbers of even places and of odd ones in their order.
  static void InOrder(Floats even, Floats odd, Floats (&x)[2]) {
    auto both = [](float32x4_t even, float32x4_t odd) { return Floats{vzip1q_f32(even, odd), vzip2q_f32(even, odd)}; };
    x[0] = both(even.low, odd.low), x[1] = both(even.high, odd.high);
  }

  // The other way round: takes numbers in their order apart.
  static void EvenOdd(Floats first, Floats second, Floats& even, Floats& odd) {
    even = {vuzp1q_f32(first.low, first.high), vuzp1q_f32(second.low, second.high)};
    odd = {vuzp2q_f32(first.low, first.high), vuzp2q_f32(second.low, second.high)};
  }

  // 8 in their own order.
  static Floats FromBf16(const bf16* from) {
    uint16x8_t words = vld1q_u16(from);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(words), 16))};
  }

  // --- 16 bytes, likewise.

  // Values of int8 over kInt8.
  static constexpr float kInt8 = 1.0f;
  static void FromInt8(const int8_t* from, Floats& even, Floats& odd) {
    int16x8_t pairs = vreinterpretq_s16_s8(vld1q_s8(from));
    even = FromWords(vshrq_n_s16(vshlq_n_s16(pairs, 8), 8)), odd = FromWords(vshrq_n_s16(pairs, 8));
  }

  // Values of e4m3 over kE4m3: with one bit more of exponent they are f16, in which those below the normal ones come right.
  static constexpr float kE4m3 = 256.0f;
  static void FromE4m3(const E4m3* from, Floats& even, Floats& odd) {
    uint16x8_t pairs = vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from)));
    auto wide = [](uint16x8_t upper) -> Floats {  // a value in the upper byte of each word
      int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u16(upper), 1);
      float16x8_t half = vreinterpretq_f16_s16(vandq_s16(shifted, vdupq_n_s16(static_cast<int16_t>(0xbfff))));
      return {vcvt_f32_f16(vget_low_f16(half)), vcvt_f32_f16(vget_high_f16(half))};
    };
    even = wide(vshlq_n_u16(pairs, 8)), odd = wide(vandq_u16(pairs, vdupq_n_u16(0xff00)));
  }

  // Writes, for each of 32 values of 4 bits as int4 packs them, what the table has for it.
  static void LookUp(const bf16 (&table)[16], const uint8_t* from, bf16* to) {
    uint8x16x2_t halves = vld2q_u8(reinterpret_cast<const uint8_t*>(table));  // the lower bytes, the upper ones
    uint8x16_t bytes = vld1q_u8(from);
    auto put = [&](uint8x16_t index, bf16* to) {
      uint8x16x2_t values = {{vqtbl1q_u8(halves.val[0], index), vqtbl1q_u8(halves.val[1], index)}};
      vst2q_u8(reinterpret_cast<uint8_t*>(to), values);
    };
    put(vandq_u8(bytes, vdupq_n_u8(15)), to), put(vshrq_n_u8(bytes, 4), to + 16);
  }

  // --- words of 16 bits

  static Words ZeroWords() { return SetWords(0); }
  static Words SetWords(int x) { return {vdupq_n_u16(x), vdupq_n_u16(x)}; }
  static Words HalfOfWords(const void* from) { return {vld1q_u16(static_cast<const uint16_t*>(from)), vdupq_n_u16(0)}; }
  static void StoreWords(void* to, Words x) {
    vst1q_u16(static_cast<uint16_t*>(to), x.low), vst1q_u16(static_cast<uint16_t*>(to) + 8, x.high);
  }
  static Words And(Words a, Words b) { return {vandq_u16(a.low, b.low), vandq_u16(a.high, b.high)}; }
  static Words SubWords(Words a, Words b) { return {vsubq_u16(a.low, b.low), vsubq_u16(a.high, b.high)}; }
  static Words MaxUnsigned(Words a, Words b) { return {vmaxq_u16(a.low, b.low), vmaxq_u16(a.high, b.high)}; }
  template <int bits>
  static Words ShiftRight(Words x) {
    return {vshrq_n_u16(x.low, bits), vshrq_n_u16(x.high, bits)};
  }

  // 16 bytes with a sign.
  static Words WordsOf(const uint8_t* from) {
    int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(from));
    return {Wide(vget_low_s8(bytes)), Wide(vget_high_s8(bytes))};
  }

  // first: 8 bytes from `one` and 8 from `other`; second: the 8 after these.
  static void WordsOf(const uint8_t* one, const uint8_t* other, Words& first, Words& second) {
    int8x16_t a = vreinterpretq_s8_u8(vld1q_u8(one));
    int8x16_t b = other == nullptr ? vdupq_n_s8(0) : vreinterpretq_s8_u8(vld1q_u8(other));
    first = {Wide(vget_low_s8(a)), Wide(vget_low_s8(b))}, second = {Wide(vget_high_s8(a)), Wide(vget_high_s8(b))};
  }

  // Writes even and odd numbers in turn, rounded to whole ones.
  static void PutWhole(int16_t* to, Floats even, Floats odd) {
    auto both = [](float32x4_t even, float32x4_t odd) {
      return vtrn1q_s16(vreinterpretq_s16_s32(vcvtnq_s32_f32(even)), vreinterpretq_s16_s32(vcvtnq_s32_f32(odd)));
    };
    vst1q_s16(to, both(even.low, odd.low)), vst1q_s16(to + 8, both(even.high, odd.high));
  }

  // Writes 16 numbers rounded to whole ones.
  static void PutWholeWords(int16_t* to, Floats first, Floats second) {
    auto put = [](int16_t* to, Floats x) {
      vst1q_s16(to, vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.low)), vqmovn_s32(vcvtnq_s32_f32(x.high))));
    };
    put(to, first), put(to + 8, second);
  }

  // Even and odd numbers rounded to whole ones: of each 8 the even ones, then the odd ones.
  static Words WholeEvenOdd(Floats even, Floats odd) {
    auto both = [](float32x4_t even, float32x4_t odd) {
      int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(even)), high = vqmovn_s32(vcvtnq_s32_f32(odd));
      return vreinterpretq_u16_s16(vcombine_s16(low, high));
    };
    return {both(even.low, odd.low), both(even.high, odd.high)};
  }

  // Two words in all lanes.
  static Words SetPair(const int16_t* from) {
    uint32_t two;
    std::memcpy(&two, from, sizeof(two));
    uint16x8_t all = vreinterpretq_u16_u32(vdupq_n_u32(two));
    return {all, all};
  }

  // Lane i is a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1].
  static Integers PairSums(Words a, Words b) {
    auto sums = [](uint16x8_t a, uint16x8_t b) {
      int16x8_t x = vreinterpretq_s16_u16(a), y = vreinterpretq_s16_u16(b);
      return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
    };
    return {sums(a.low, b.low), sums(a.high, b.high)};
  }

  // Keeps compilers from loading these again at each use, when loads are what a loop would wait for.
  static void KeepInRegisters(Words (&x)[4]) {
    for (Words& words : x) asm("" : "+w"(words.low), "+w"(words.high));
  }
  static void KeepInRegister(Floats& x) { asm("" : "+w"(x.low), "+w"(x.high)); }
  static void KeepInRegister(Integers& x) { asm("" : "+w"(x.low), "+w"(x.high)); }
  static void KeepInRegister(Words& x) { asm("" : "+w"(x.low), "+w"(x.high)); }

  static Integers ZeroIntegers() { return SetIntegers(0); }
  static Integers SetIntegers(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
  static Integers AddIntegers(Integers a, Integers b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
  static Integers AddPairSums(Integers sum, Words a, Words b) { return AddIntegers(sum, PairSums(a, b)); }
  static Integers MaxIntegers(Integers a, Integers b) { return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)}; }
  // The bits of numbers without their signs: in the order of sizes, NaN the largest.
  static Integers SizesOf(Floats x) {
    auto size = [](float32x4_t x) { return vreinterpretq_s32_f32(vabsq_f32(x)); };
    return {size(x.low), size(x.high)};
  }
  static void StoreIntegers(int32_t* to, Integers x) { vst1q_s32(to, x.low), vst1q_s32(to + 4, x.high); }
  static int32_t SumOf(Integers x) { return vaddvq_s32(vaddq_s32(x.low, x.high)); }
  static Floats ToFloats(Integers x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
  static Floats SetHalves(float low, float high) { return {vdupq_n_f32(low), vdupq_n_f32(high)}; }

  // --- bytes

  static Bytes LoadBytes(const void* from) {
    const int8_t* bytes = static_cast<const int8_t*>(from);
    return {vld1q_s8(bytes), vld1q_s8(bytes + 16)};
  }
  static void StoreBytes(void* to, Bytes x) {
    vst1q_s8(static_cast<int8_t*>(to), x.low), vst1q_s8(static_cast<int8_t*>(to) + 16, x.high);
  }

  // The bytes in even places, and those in odd ones, as words.
  static Words EvenBytes(Bytes x) {
    auto even = [](int8x16_t x) {
      return vreinterpretq_u16_s16(vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s8(x), 8), 8));
    };
    return {even(x.low), even(x.high)};
  }
  static Words OddBytes(Bytes x) {
    auto odd = [](int8x16_t x) { return vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_s8(x), 8)); };
    return {odd(x.low), odd(x.high)};
  }

  // Pairs of bytes of a and of b in turn: those of the lower 8 bytes of each 16, and those of the upper ones.
  static Bytes ZipLower(Bytes a, Bytes b) {
    auto zip = [](int8x16_t a, int8x16_t b) {
      return vreinterpretq_s8_s16(vzip1q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
    };
    return {zip(a.low, b.low), zip(a.high, b.high)};
  }
  static Bytes ZipUpper(Bytes a, Bytes b) {
    auto zip = [](int8x16_t a, int8x16_t b) {
      return vreinterpretq_s8_s16(vzip2q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
    };
    return {zip(a.low, b.low), zip(a.high, b.high)};
  }

  // 32 values of int4.
  static Bytes FromInt4(const uint8_t* from) {
    uint8x16_t bytes = vld1q_u8(from);
    int8x16_t low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
    int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    return {vsubq_s8(low, vdupq_n_s8(8)), vsubq_s8(high, vdupq_n_s8(8))};
  }

  // Integers whose sum is that of the products of w and x.
  static Integers Products(Bytes w, Bytes x) {
    auto sums = [](int8x16_t w, int8x16_t x) {
      int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
      return vpadalq_s16(low, vmull_high_s8(w, x));
    };
    return {sums(w.low, x.low), sums(w.high, x.high)};
  }

  // Lane i is the sum of the lanes of a[i].
  static Integers SumsOf(const Integers (&a)[8]) {
    int32x4_t pairs[8];
    for (int i = 0; i < 8; ++i) pairs[i] = vaddq_s32(a[i].low, a[i].high);
    return {vpaddq_s32(vpaddq_s32(pairs[0], pairs[1]), vpaddq_s32(pairs[2], pairs[3])),
            vpaddq_s32(vpaddq_s32(pairs[4], pairs[5]), vpaddq_s32(pairs[6], pairs[7]))};
  }

 private:
  static uint16x8_t Wide(int8x8_t bytes) { return vreinterpretq_u16_s16(vmovl_s8(bytes)); }
  static Floats FromWords(int16x8_t x) { return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))}; }

  // The nearest bf16 in the upper half of each lane.
  static uint32x4_t Rounded(float32x4_t x) {
    uint32x4_t quiet = vorrq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x400000));
    return vbslq_u32(vceqq_f32(x, x), RoundedUp(x), quiet);
  }

  // The same of no NaN but those that RoundedToBf16 takes.
  static uint32x4_t RoundedUp(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), is_odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(bits, vaddq_u32(is_odd, vdupq_n_u32(0x7fff)));
  }
};

}  // namespace jpaged::neon
