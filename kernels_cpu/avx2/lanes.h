// The registers of AVX2 and FMA by the names that every level's lanes.h has (struct Lanes).
#pragma once

#include <immintrin.h>

#include "../quantized.h"

namespace jpaged::avx2 {

// 8 f32 in a register, or as many bits of integers.
struct Lanes {
  static constexpr int64_t kCount = 8;
  using Floats = __m256;
  using Mask = __m256;
  using Integers = __m256i;  // 8 of 32 bits
  using Words = __m256i;     // 16 of 16 bits
  using Bytes = __m256i;     // 32 of 8 bits

  static Floats Zero() { return _mm256_setzero_ps(); }
  static Floats Set(float x) { return _mm256_set1_ps(x); }
  static Floats Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
  static void StoreSix(float* to, Floats x) {  // the first six
    _mm_storeu_ps(to, _mm256_castps256_ps128(x)), _mm_storel_pi((__m64*)(to + 4), _mm256_extractf128_ps(x, 1));
  }
  static Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats Sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats Mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats Div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats Sqrt(Floats x) { return _mm256_sqrt_ps(x); }
  static Floats Max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats Fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
  static Floats Fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
  // Adds a * b to sum in the register that it has: left to themselves, compilers move sums of long loops about until they run out of
  // registers.
  static void AddProduct(Floats& sum, Floats a, Floats b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

  // y * 2^n where the mask is set, else 0; moved: n plus 1.5 * 2^23.
  static Floats TimesPower(Mask mask, Floats y, Floats moved) {
    __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(moved), 23), _mm256_set1_epi32(127 << 23));
    return _mm256_and_ps(mask, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
  }

  // Where x is not below y, or is NaN.
  static Mask NotBelow(Floats x, Floats y) { return _mm256_cmp_ps(x, y, _CMP_NLT_UQ); }

  static Floats OrZero(Mask mask, Floats x) { return _mm256_and_ps(mask, x); }

  // a * b where the mask is set, else `other`.
  static Floats MulOr(Floats other, Mask mask, Floats a, Floats b) {
    return _mm256_blendv_ps(other, _mm256_mul_ps(a, b), mask);
  }

  // Element i is the sum of the lanes of the i-th.
  static void PutSums(float* to, Floats a0, Floats a1, Floats a2, Floats a3) {
    __m256 t = Pairs(Pairs(a0, a1), Pairs(a2, a3));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }

  // The same of integers, as f32.
  static void PutSums(float* to, Integers a0, Integers a1, Integers a2, Integers a3) {
    __m256i t = Pairs(Pairs(a0, a1), Pairs(a2, a3));
    _mm_storeu_ps(to, _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1))));
  }

  // Lane i of to[j] is the j-th of rows[i].
  static void Turn(const float* const (&rows)[8], Floats (&to)[8]) {
    auto load = [&](int i, int j) { return _mm256_set_m128(_mm_loadu_ps(rows[i + 4] + j), _mm_loadu_ps(rows[i] + j)); };
#pragma GCC unroll 2
    for (int j = 0; j < 8; j += 4) {
      Floats a = load(0, j), b = load(1, j), c = load(2, j), d = load(3, j);
      Floats ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
      to[j] = _mm256_shuffle_ps(ab, cd, 0x44), to[j + 1] = _mm256_shuffle_ps(ab, cd, 0xee);
      ab = _mm256_unpackhi_ps(a, b), cd = _mm256_unpackhi_ps(c, d);
      to[j + 2] = _mm256_shuffle_ps(ab, cd, 0x44), to[j + 3] = _mm256_shuffle_ps(ab, cd, 0xee);
    }
  }

  // a and b become their lower halves and their upper halves.
  static void TradeHalves(Floats& a, Floats& b) {
    Floats lower = _mm256_permute2f128_ps(a, b, 0x20);
    b = _mm256_permute2f128_ps(a, b, 0x31), a = lower;
  }

  static float Sum(Floats x) {
    __m256 t = Pairs(Pairs(x, x), Pairs(x, x));
    return _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }

  // The second half of the lanes is added to the first one until there is one.
  static float SumOfHalves(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

  // Element i is that sum of the i-th.
  static void PutSumsOfHalves(float* to, Floats a0, Floats a1, Floats a2, Floats a3) {
    auto halves = [](Floats a, Floats b) { return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); };
    Floats four = halves(a0, a2), others = halves(a1, a3);
    Floats two = _mm256_add_ps(_mm256_shuffle_ps(four, others, 0x44), _mm256_shuffle_ps(four, others, 0xee));
    Floats one = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    _mm_storeu_ps(to, _mm_shuffle_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1), 0x88));
  }

  static float Largest(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

  // Writes x, and returns what was written.
  static Floats Put(float* to, Floats x) { return Store(to, x), x; }

  // Numbers in [low, high).
  class Range {
   public:
    Range(int64_t low, int64_t high) : below_(_mm256_set1_epi32(low - 1)), end_(_mm256_set1_epi32(high)) {}
    Mask Lanes(int i) const {  // of lanes that are 8 i, 8 i + 1, ...
      __m256i number = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kCount * i));
      return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(number, below_), _mm256_cmpgt_epi32(end_, number)));
    }

   private:
    __m256i below_, end_;
  };

  // --- bf16: 16 become two registers of f32, those in even places and those in odd ones, each by one instruction.

  static Words LoadWords(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
  static Floats Even(Words words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
  static Floats Odd(Words words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void EvenOdd(const bf16* from, Floats& even, Floats& odd) {
    Words words = LoadWords(from);
    even = Even(words), odd = Odd(words);
  }

  // Lane i of pairs[k] has the inputs e + 2 k and e + 2 k + 1 of row i.
  static void PairsOfRows(const bf16* const (&rows)[kCount], int64_t e, Words (&pairs)[kCount / 2]) {
    auto load = [&](int i) { return _mm_loadu_si128((const __m128i*)(rows[i] + e)); };
    __m256i a = _mm256_set_m128i(load(4), load(0)), b = _mm256_set_m128i(load(5), load(1));
    __m256i c = _mm256_set_m128i(load(6), load(2)), d = _mm256_set_m128i(load(7), load(3));
    __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    pairs[0] = _mm256_unpacklo_epi64(ab, cd), pairs[1] = _mm256_unpackhi_epi64(ab, cd);
    ab = _mm256_unpackhi_epi32(a, b), cd = _mm256_unpackhi_epi32(c, d);
    pairs[2] = _mm256_unpacklo_epi64(ab, cd), pairs[3] = _mm256_unpackhi_epi64(ab, cd);
  }

  // Rounds to the nearest bf16, the even one of two; NaN stays NaN.
  static void PutEvenOdd(bf16* to, Floats even, Floats odd) {
    __m256i words = _mm256_blend_epi16(_mm256_srli_epi32(Rounded(even), 16), Rounded(odd), 0xaa);
    _mm256_storeu_si256((__m256i*)to, words);
  }

  // The same of 16 in their own order.
  static void PutInOrder(bf16* to, Floats first, Floats second) {
    __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(Rounded(first), 16), _mm256_srli_epi32(Rounded(second), 16));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(words, 0xd8));
  }

  // Rounds 8 numbers. A NaN must end in 16 zeros, as those that come of bf16 do: it stays NaN.
  static Floats RoundedToBf16(Floats x) {
    return _mm256_castsi256_ps(_mm256_and_si256(RoundedUp(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void PutRounded(bf16* to, Floats x) {
    __m256i words = _mm256_srli_epi32(RoundedUp(x), 16);
    _mm_storeu_si128((__m128i*)to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }

  // Writes 16 numbers of even places and of odd ones, rounded in the same way.
  static void PutRounded(bf16* to, Floats even, Floats odd) {
    _mm256_storeu_si256((__m256i*)to, _mm256_blend_epi16(_mm256_srli_epi32(RoundedUp(even), 16), RoundedUp(odd), 0xaa));
  }

  // Writes numbers of even places and of odd ones, which bf16 holds.
  static void PutExact(bf16* to, Floats even, Floats odd) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
    _mm256_storeu_si256((__m256i*)to, _mm256_or_si256(low, _mm256_castps_si256(odd)));
  }

  // Puts numbers of even places and of odd ones in their order.
  static void InOrder(Floats even, Floats odd, Floats (&x)[2]) {
    Floats low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    x[0] = _mm256_permute2f128_ps(low, high, 0x20), x[1] = _mm256_permute2f128_ps(low, high, 0x31);
  }

  // The other way round: takes numbers in their order apart.
  static void EvenOdd(Floats first, Floats second, Floats& even, Floats& odd) {
    Floats low = _mm256_permute2f128_ps(first, second, 0x20), high = _mm256_permute2f128_ps(first, second, 0x31);
    even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xdd);
  }

  // 8 in their own order.
  static Floats FromBf16(const bf16* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16));
  }

  // --- 16 bytes, likewise.

  // Values of int8 over kInt8: in the upper byte of each lane.
  static constexpr float kInt8 = 0x1p-24f;
  static void FromInt8(const int8_t* from, Floats& even, Floats& odd) {
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
    const __m256i evens = _mm256_setr_epi64x(0x0280808000808080, 0x0680808004808080, 0x0a80808008808080, 0x0e8080800c808080);
    const __m256i odds = _mm256_setr_epi64x(0x0380808001808080, 0x0780808005808080, 0x0b80808009808080, 0x0f8080800d808080);
    even = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, evens));
    odd = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, odds));
  }

  // Values of e4m3 over kE4m3: with one bit more of exponent they are f16, in which those below the normal ones come right.
  static constexpr float kE4m3 = 256.0f;
  static void FromE4m3(const E4m3* from, Floats& even, Floats& odd) {
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
    // Even ones in the low half, each in the upper byte of a word and, for its sign to be shifted in, in the lower one zero.
    const __m256i pick = _mm256_setr_epi64x(0x0680048002800080, 0x0e800c800a800880, 0x0780058003800180, 0x0f800d800b800980);
    __m256i words = _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, pick), 1);
    __m256i half = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbfff)));
    even = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    odd = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
  }

  // Writes, for each of 32 values of 4 bits as int4 packs them, what the table has for it.
  static void LookUp(const bf16 (&table)[16], const uint8_t* from, bf16* to) {
    __m256i words = LoadWords(table), four = _mm256_set1_epi8(15);
    __m256i packed = _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(255)), _mm256_srli_epi16(words, 8));
    packed = _mm256_permute4x64_epi64(packed, 0xd8);  // the lower bytes, then the upper ones
    __m256i lower = _mm256_permute2x128_si256(packed, packed, 0x00), upper = _mm256_permute2x128_si256(packed, packed, 0x11);
    __m128i bytes = _mm_loadu_si128((const __m128i*)from);
    __m256i index = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), four);
    index = _mm256_permute4x64_epi64(index, 0xd8);  // so that unpacking leaves them in order
    __m256i low = _mm256_shuffle_epi8(lower, index), high = _mm256_shuffle_epi8(upper, index);
    __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256((__m256i*)to, first), _mm256_storeu_si256((__m256i*)(to + 16), second);
  }

  // --- words of 16 bits

  static Words ZeroWords() { return _mm256_setzero_si256(); }
  static Words SetWords(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
  static Words HalfOfWords(const void* from) { return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)from)); }
  static void StoreWords(void* to, Words x) { _mm256_storeu_si256((__m256i*)to, x); }
  static Words And(Words a, Words b) { return _mm256_and_si256(a, b); }
  static Words SubWords(Words a, Words b) { return _mm256_sub_epi16(a, b); }
  static Words MaxUnsigned(Words a, Words b) { return _mm256_max_epu16(a, b); }
  template <int bits>
  static Words ShiftRight(Words x) {
    return _mm256_srli_epi16(x, bits);
  }

  // 16 bytes with a sign.
  static Words WordsOf(const uint8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }

  // first: 8 bytes from `one` and 8 from `other`; second: the 8 after these.
  static void WordsOf(const uint8_t* one, const uint8_t* other, Words& first, Words& second) {
    __m128i a = _mm_loadu_si128((const __m128i*)one);
    __m128i b = other == nullptr ? _mm_setzero_si128() : _mm_loadu_si128((const __m128i*)other);
    first = _mm256_cvtepi8_epi16(_mm_unpacklo_epi64(a, b)), second = _mm256_cvtepi8_epi16(_mm_unpackhi_epi64(a, b));
  }

  // Writes even and odd numbers in turn, rounded to whole ones.
  static void PutWhole(int16_t* to, Floats even, Floats odd) {
    __m256i high = _mm256_slli_epi32(_mm256_cvtps_epi32(odd), 16);
    StoreWords(to, _mm256_blend_epi16(_mm256_cvtps_epi32(even), high, 0xaa));
  }

  // Writes 16 numbers rounded to whole ones.
  static void PutWholeWords(int16_t* to, Floats first, Floats second) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
    StoreWords(to, _mm256_permute4x64_epi64(words, 0xd8));
  }

  // Even and odd numbers rounded to whole ones: of each 8 the even ones, then the odd ones.
  static Words WholeEvenOdd(Floats even, Floats odd) {
    return _mm256_packs_epi32(_mm256_cvtps_epi32(even), _mm256_cvtps_epi32(odd));
  }

  // Two words in all lanes.
  static Words SetPair(const int16_t* from) {
    int32_t two;
    std::memcpy(&two, from, sizeof(two));
    return _mm256_set1_epi32(two);
  }

  // Lane i is a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1].
  static Integers PairSums(Words a, Words b) { return _mm256_madd_epi16(a, b); }

  // Keeps compilers from loading these again at each use, when loads are what a loop would wait for.
  static void KeepInRegisters(Words (&x)[4]) { asm("" : "+x"(x[0]), "+x"(x[1]), "+x"(x[2]), "+x"(x[3])); }
  static void KeepInRegister(Floats& x) { asm("" : "+x"(x)); }
  static void KeepInRegister(Integers& x) { asm("" : "+x"(x)); }

  static Integers ZeroIntegers() { return _mm256_setzero_si256(); }
  static Integers SetIntegers(int32_t x) { return _mm256_set1_epi32(x); }
  static Integers AddIntegers(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
  static Integers AddPairSums(Integers sum, Words a, Words b) { return AddIntegers(sum, PairSums(a, b)); }
  static Integers MaxIntegers(Integers a, Integers b) { return _mm256_max_epi32(a, b); }
  // The bits of numbers without their signs: in the order of sizes, NaN the largest.
  static Integers SizesOf(Floats x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
  static void StoreIntegers(int32_t* to, Integers x) { _mm256_storeu_si256((__m256i*)to, x); }
  static int32_t SumOf(Integers x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
  }
  static Floats ToFloats(Integers x) { return _mm256_cvtepi32_ps(x); }
  static Floats SetHalves(float low, float high) { return _mm256_blend_ps(Set(low), Set(high), 0xf0); }

  // --- bytes

  static Bytes LoadBytes(const void* from) { return LoadWords(from); }
  static void StoreBytes(void* to, Bytes x) { StoreWords(to, x); }

  // The bytes in even places, and those in odd ones, as words.
  static Words EvenBytes(Bytes x) { return _mm256_maddubs_epi16(_mm256_set1_epi16(1), x); }
  static Words OddBytes(Bytes x) { return _mm256_srai_epi16(x, 8); }

  // Pairs of bytes of a and of b in turn: those of the lower 8 bytes of each 16, and those of the upper ones.
  static Bytes ZipLower(Bytes a, Bytes b) { return _mm256_unpacklo_epi16(a, b); }
  static Bytes ZipUpper(Bytes a, Bytes b) { return _mm256_unpackhi_epi16(a, b); }

  // 32 values of int4.
  static Bytes FromInt4(const uint8_t* from) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)from);
    __m256i values = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
    return _mm256_sub_epi8(values, _mm256_set1_epi8(8));
  }

  // Integers whose sum is that of the products of w and x. x is above -128, w any: 2 * 128 * 127 is below 2^15.
  static Integers Products(Bytes w, Bytes x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
  }

  // Lane i is the sum of the lanes of a[i].
  static Integers SumsOf(const Integers (&a)[8]) {
    Integers low = Pairs(Halves(a[0], a[1]), Halves(a[2], a[3])), high = Pairs(Halves(a[4], a[5]), Halves(a[6], a[7]));
    return _mm256_add_epi32(_mm256_blend_epi32(low, high, 0xf0), _mm256_permute2x128_si256(low, high, 0x21));
  }

 private:
  // Sums of neighbours of a, then of b, in each half: as _mm256_hadd_ps, which takes Zen 3 twice the time.
  static Floats Pairs(Floats a, Floats b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  }

  static __m256i Pairs(__m256i a, __m256i b) {
    __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
  }

  // Sums of the first two and the last two of a, then of b, in each half.
  static __m256i Halves(__m256i a, __m256i b) {
    __m256 crossed = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x4e);
    return _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xcc), _mm256_castps_si256(crossed));
  }

  // The nearest bf16 in the upper half of each lane.
  static __m256i Rounded(Floats x) {
    __m256i quiet = _mm256_or_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(RoundedUp(x), quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }

  // The same of no NaN but those that RoundedToBf16 takes.
  static __m256i RoundedUp(Floats x) {
    __m256i bits = _mm256_castps_si256(x), is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  }
};

}  // namespace jpaged::avx2
