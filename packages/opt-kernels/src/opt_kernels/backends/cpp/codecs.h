// Codecs of states, as `opt_kernels/codecs/codec.py` defines them: a group of codes under one scale at a time.
//
// Loops are written so that compilers vectorise them for any processor. What they cannot vectorise, conversions of half
// and look-ups of bytes, has a second version for processors with instructions for it, with the same results.
//
// Each codec has:
//
//   scale_at(scales, begin)                     where the scale of the group from element `begin` is
//   decode(codes, scale, values, n)             writes the n values, at most GROUP, of a group
//   kept(x)                                     what is encoded of a state: its root where it is never negative
//   KEEPS                                       whether kept(x) is x
//   encode(values, largest, codes, scale, n)    writes codes and scale; `largest` is max |value|, as the word of a float

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

// `code`, at least 1 where x is above zero; compared as words, which is faster than as floats.
static inline int32_t at_least_one(int32_t code, float x) {
    const int32_t word = int32_t(word_of(x));
    return at_least(code, word < 1 ? word : 1);
}

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
#define ONLY_AVX2 1  // compilers vectorise as well where there is AVX-512

// 32 elements in four registers. Each operation is written for all four before the next one, because a processor does not
// look far enough ahead to overlap four chains of operations that come one after the other.
#define EACH for (int q = 0; q < 4; q++)

static inline __m256 all(float x) { return _mm256_set1_ps(x); }
static inline __m256 absolute(__m256 x) { return _mm256_andnot_ps(all(-0.0f), x); }

static inline void load_32(const float *values, __m256 (&x)[4]) { EACH x[q] = _mm256_loadu_ps(values + 8 * q); }

// A byte for each float: zero for zero, else of the float's sign. Bytes are in the order in which packing leaves them;
// `store_32` restores that of the elements.
static inline __m256i signs_of(const __m256 (&x)[4]) {
    __m256i words[4];
    EACH words[q] = _mm256_castps_si256(x[q]);
    return _mm256_packs_epi16(_mm256_packs_epi32(words[0], words[1]), _mm256_packs_epi32(words[2], words[3]));
}

// `codes`, at least 1 where x is above zero.
static inline __m256i at_least_one(__m256i codes, const __m256 (&x)[4]) {
    const __m256i above_zero = _mm256_cmpgt_epi8(signs_of(x), _mm256_setzero_si256());
    return _mm256_max_epu8(codes, _mm256_and_si256(above_zero, _mm256_set1_epi8(1)));
}

static inline void store_32(void *codes, __m256i bytes) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)codes, _mm256_permutevar8x32_epi32(bytes, order));
}
#endif

// --- a group of codes as floats, and back ------------------------------------------------------------------------------

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
// Values of 128 codes without a sign, as four tables of bytes: a processor looks up 64 bytes at a time.
struct Table {
    alignas(64) uint8_t bytes[4][128];

    template <class Value>
    explicit Table(Value value) {
        for (int code = 0; code < 128; code++)
            for (int byte = 0; byte < 4; byte++) bytes[byte][code] = uint8_t(word_of(value(code)) >> (8 * byte));
    }

    inline __m512i byte(int which, __m512i indices) const {
        const __m512i *halves = (const __m512i *)bytes[which];
        return _mm512_permutex2var_epi8(halves[0], indices, halves[1]);
    }

    // Writes 64 values of `indices`, whose sign is the upper bit of `signs`.
    inline void look_up(__m512i indices, __m512i signs, float *values) const {
        // Bytes are joined within quarters of a register: every fourth word first, so that they come out in order.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        indices = _mm512_permutexvar_epi32(order, indices);
        signs = _mm512_and_si512(_mm512_permutexvar_epi32(order, signs), _mm512_set1_epi8(-128));
        const __m512i lower = byte(0, indices), low = byte(1, indices), high = byte(2, indices);
        const __m512i higher = _mm512_or_si512(byte(3, indices), signs);
        const __m512i low0 = _mm512_unpacklo_epi8(lower, low), high0 = _mm512_unpacklo_epi8(high, higher);
        const __m512i low1 = _mm512_unpackhi_epi8(lower, low), high1 = _mm512_unpackhi_epi8(high, higher);
        _mm512_storeu_si512(values, _mm512_unpacklo_epi16(low0, high0));
        _mm512_storeu_si512(values + 16, _mm512_unpackhi_epi16(low0, high0));
        _mm512_storeu_si512(values + 32, _mm512_unpacklo_epi16(low1, high1));
        _mm512_storeu_si512(values + 48, _mm512_unpackhi_epi16(low1, high1));
    }
};
#endif

using E4M3 = Narrow<8, 3, 7>;
using E5M2 = Narrow<8, 2, 15>;

// A code's float under its scale; squared where the code is that of a root.
template <bool SIGNED>
static inline float scaled(float x, float scale) {
    const float y = x * scale;
    return SIGNED ? y : y * y;
}

#if defined(__F16C__)
template <bool SIGNED>
static inline void widen_8(__m128i halves, float scale, float *values) {
    const __m256 y = _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(scale));
    _mm256_storeu_ps(values, SIGNED ? y : _mm256_mul_ps(y, y));
}
#endif

#if defined(__AVX2__) && defined(__F16C__)
// The upper byte of a half.
static inline __m256i halves_of(E5M2, __m128i codes) { return _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8); }
static inline float scale_of_halves(E5M2, float scale) { return scale; }

// A half of an exponent that is 8 less.
static inline __m256i halves_of(E4M3, __m128i codes) {
    return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(short(0xBFFF)));
}
static inline float scale_of_halves(E4M3, float scale) { return scale * 256.0f; }
#endif

template <class Float, bool SIGNED>
static inline void widen(const uint8_t *codes, float scale, float *values, int64_t n) {
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
    static const Table table(Float::value);
    if (n == GROUP) {
        for (int64_t k = 0; k < GROUP; k += 64) {
            const __m512i part = _mm512_loadu_si512(codes + k);
            table.look_up(part, part, values + k);  // the upper bit of an index is not looked at
        }
        for (int64_t k = 0; k < GROUP; k++) values[k] = scaled<SIGNED>(values[k], scale);
        return;
    }
#endif
    int64_t k = 0;
#if defined(__AVX2__) && defined(__F16C__)
    const float factor = scale_of_halves(Float(), scale);
    for (; k + 16 <= n && factor < 0x1p127f; k += 16) {
        const __m256i halves = halves_of(Float(), _mm_loadu_si128((const __m128i *)(codes + k)));
        widen_8<SIGNED>(_mm256_castsi256_si128(halves), factor, values + k);
        widen_8<SIGNED>(_mm256_extracti128_si256(halves, 1), factor, values + k + 8);
    }
#endif
    for (; k < n; k++) values[k] = scaled<SIGNED>(Float::value(codes[k]), scale);
}

template <class Float, bool SIGNED>
static inline void widen(const half *codes, float scale, float *values, int64_t n) {
    int64_t k = 0;
#if defined(__AVX512F__)
    for (; k + 16 <= n; k += 16) {
        const __m512 halves = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(codes + k)));
        const __m512 y = _mm512_mul_ps(halves, _mm512_set1_ps(scale));
        _mm512_storeu_ps(values + k, SIGNED ? y : _mm512_mul_ps(y, y));
    }
#elif defined(__F16C__)
    for (; k + 8 <= n; k += 8) widen_8<SIGNED>(_mm_loadu_si128((const __m128i *)(codes + k)), scale, values + k);
#endif
    for (; k < n; k++) values[k] = scaled<SIGNED>(Float::value(codes[k].bits), scale);
}

#if ONLY_AVX2
// 32 codes, as `narrow` has them, of values that are rounded without being scaled: `normal` is the word of the smallest
// value whose code is normal. A sum's exponent and units are halves of its word, which one product of integers joins. Signs,
// and what is above zero, are seen in words saturated to bytes, four times as many at a time.
template <class Float, bool SIGNED>
static inline void narrow_32(const float *values, uint32_t normal, uint8_t *codes) {
    constexpr int SHIFT = Float::SHIFT, ROOM = SHIFT - 16;
    __m256 x[4];
    __m256i code[4];
    load_32(values, x);
    EACH {
        const __m256 size = SIGNED ? absolute(x[q]) : x[q];
        const __m256i larger = _mm256_max_epi32(_mm256_castps_si256(size), _mm256_set1_epi32(int(normal)));
        const __m256i exponent = _mm256_and_si256(larger, _mm256_set1_epi32(INFINITE));
        const __m256i power = _mm256_add_epi32(exponent, _mm256_set1_epi32(SHIFT << 23));
        const __m256i sum = _mm256_castps_si256(_mm256_add_ps(size, _mm256_castsi256_ps(power)));
        code[q] = _mm256_madd_epi16(sum, _mm256_set1_epi32(1 << 16 | 1 << ROOM));
    }
    const __m256i least = _mm256_set1_epi16(short((normal + (uint32_t(SHIFT) << 23)) >> 16));
    const __m256i first = _mm256_sub_epi16(_mm256_packs_epi32(code[0], code[1]), least);
    const __m256i second = _mm256_sub_epi16(_mm256_packs_epi32(code[2], code[3]), least);
    const __m256i sizes = _mm256_packus_epi16(_mm256_srli_epi16(first, ROOM), _mm256_srli_epi16(second, ROOM));
    const __m256i signs = _mm256_and_si256(signs_of(x), _mm256_set1_epi8(char(Float::SIGN)));
    const __m256i bytes = _mm256_or_si256(sizes, signs);
    store_32(codes, SIGNED ? bytes : at_least_one(bytes, x));
}
#endif

// Codes of values times `factor`, a power of two; where they are not SIGNED, at least the smallest code above zero.
template <class Float, bool SIGNED>
static inline void narrow(const float *values, float factor, uint8_t *codes, int64_t n) {
    int64_t k = 0;
#if ONLY_AVX2
    // NORMAL over a power of two; of moderate ones, so that sums are finite and normal.
    const uint32_t power = word_of(factor), normal = Float::NORMAL + (127u << 23) - power;
    const bool is_moderate = power - (63u << 23) < 128u << 23;
    for (; k + 32 <= n && is_moderate; k += 32) narrow_32<Float, SIGNED>(values + k, normal, codes + k);
#endif
#pragma GCC ivdep
    for (; k < n; k++) {
        const int32_t code = int32_t(Float::code(values[k] * factor));
        codes[k] = uint8_t(SIGNED ? code : at_least_one(code, values[k]));
    }
}

template <class Float, bool SIGNED>
static inline void narrow(const float *values, float factor, half *codes, int64_t n) {
    int64_t k = 0;
#if defined(__AVX512F__)
    const __m512 smallest = _mm512_set1_ps(Float::value(1)), factors = _mm512_set1_ps(factor);
    for (; k + 16 <= n; k += 16) {
        const __m512 x = _mm512_loadu_ps(values + k);
        __m512 y = _mm512_mul_ps(x, factors);
        if (!SIGNED) y = _mm512_mask_max_ps(y, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), y, smallest);
        _mm256_storeu_si256((__m256i *)(codes + k), _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__F16C__)
    const __m256 smallest = _mm256_set1_ps(Float::value(1)), factors = _mm256_set1_ps(factor);
    for (; k + 8 <= n; k += 8) {
        const __m256 x = _mm256_loadu_ps(values + k);
        __m256 y = _mm256_mul_ps(x, factors);
        if (!SIGNED) y = _mm256_blendv_ps(y, _mm256_max_ps(y, smallest), _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
        _mm_storeu_si128((__m128i *)(codes + k), _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; k < n; k++) {
        const int32_t code = int32_t(Float::code(values[k] * factor));
        codes[k].bits = uint16_t(SIGNED ? code : at_least_one(code, values[k]));
    }
}

// --- codecs -----------------------------------------------------------------------------------------------------------

// Common to all codecs with scales.
template <class T, bool SIGNED>
struct Coded {
    using Code = T;
    static inline float *scale_at(float *scales, int64_t begin) { return scales + begin / GROUP; }
    static constexpr bool KEEPS = SIGNED;
    static inline float kept(float x) { return SIGNED ? x : __builtin_sqrtf(x); }

    // The codes of a group with a value that is not finite: zeros, and ones where the root of a state is above zero.
    static __attribute__((noinline, cold)) void encode_lost(const float *values, Code *codes, float *scale, int64_t n) {
        *scale = float_of(0x7FC00000);
        for (int64_t k = 0; k < n; k++) set(codes[k], !SIGNED && values[k] > 0.0f);
    }

   private:
    static inline void set(half &code, uint32_t bits) { code.bits = uint16_t(bits); }
    static inline void set(uint8_t &code, uint32_t bits) { code = uint8_t(bits); }
    static inline void set(int8_t &code, uint32_t bits) { code = int8_t(bits); }
};

// A narrow float under a power of two, by which it is below 2^EXPONENT: `codecs.Scaled`.
template <class T, class Float, int EXPONENT, bool SIGNED>
struct Scaled : Coded<T, SIGNED> {
    static inline void decode(const T *codes, const float *scale, float *values, int64_t n) {
        widen<Float, SIGNED>(codes, *scale, values, n);
    }

    static inline void encode(const float *values, int32_t largest, T *codes, float *scale, int64_t n) {
        if (largest >= INFINITE) return Coded<T, SIGNED>::encode_lost(values, codes, scale, n);
        const int32_t biased = (largest >> 23) + (1 - EXPONENT), word = (biased > 1 ? biased : 1) << 23;
        *scale = largest == 0 ? 0.0f : float_of(word);
        // The reciprocal of a power of two is exact: its exponent is 254 less the scale's own.
        narrow<Float, SIGNED>(values, largest == 0 ? 1.0f : float_of((254 << 23) - word), codes, n);
    }
};

template <bool SIGNED> using ScaledHalf = Scaled<half, Binary16, 15, SIGNED>;
template <bool SIGNED> using ScaledE4M3 = Scaled<uint8_t, E4M3, 8, SIGNED>;
template <bool SIGNED> using ScaledE5M2 = Scaled<uint8_t, E5M2, 15, SIGNED>;

// code / DIVISOR, correctly rounded for every 8-bit code: a product with both halves of the reciprocal.
template <int DIVISOR>
static inline float fraction(int code) {
    constexpr float upper = 1.0f / DIVISOR, lower = float(1.0 / DIVISOR - upper);
    return fma(float(code), upper, float(code) * lower);
}

#if ONLY_AVX2
template <int DIVISOR>
static inline void fractions_32(const __m256i (&codes)[4], __m256 (&y)[4]) {
    constexpr float upper = 1.0f / DIVISOR, lower = float(1.0 / DIVISOR - upper);
    __m256 code[4];
    EACH code[q] = _mm256_cvtepi32_ps(codes[q]);
    EACH y[q] = _mm256_mul_ps(code[q], all(lower));
    EACH y[q] = _mm256_fmadd_ps(code[q], all(upper), y[q]);
}
#endif

// `Map::near` adds NEAR to y and subtracts the smallest code, which gives a float in [256, 512): bits 15 to 22 of its word
// are floor(y + 1/2) and count from that code, and the lower bits are what was cut off, in units of 2^-15. It differs from
// `Map::exact` by less than 3 units: at most six roundings, each of half a unit or less.
constexpr uint32_t MARGIN = 3;
constexpr float NEAR = 256.5f + float(MARGIN) * 0x1p-15f;

struct CompandedMap {
    static constexpr int32_t FIRST = -128;  // the smallest code

    static inline float near(float x, float divisor) {
        return fma(x / (__builtin_fabsf(x) + divisor), 254.0f, NEAR - FIRST);
    }

    static inline float exact(float n) { return n / (__builtin_fabsf(n) + 1.0f) * 254.0f; }
    static inline int32_t raised(int32_t code, float) { return code; }

    static inline float value(int code, float scale) {
        const float y = fraction<127>(code);
        return y / (2.0f - __builtin_fabsf(y)) * scale;
    }

    static inline void decode(const int8_t *codes, float scale, float *values, int64_t n) {
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
        static const Table table([](int code) { return value(code, 1.0f); });
        if (n == GROUP) {
            for (int64_t k = 0; k < GROUP; k += 64) {
                const __m512i part = _mm512_loadu_si512(codes + k);
                table.look_up(_mm512_abs_epi8(part), part, values + k);
            }
            for (int64_t k = 0; k < GROUP; k++) values[k] *= scale;
            return;
        }
#endif
        int64_t k = 0;
#if ONLY_AVX2
        for (; k + 32 <= n; k += 32) decode_32(codes + k, scale, values + k);
#endif
        for (; k < n; k++) values[k] = value(codes[k], scale);
    }

#if ONLY_AVX2
    static inline void decode_32(const int8_t *codes, float scale, float *values) {
        __m256i code[4];
        __m256 y[4], divisor[4];
        EACH code[q] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * q)));
        fractions_32<127>(code, y);
        EACH divisor[q] = _mm256_sub_ps(all(2.0f), absolute(y[q]));
        EACH y[q] = _mm256_div_ps(y[q], divisor[q]);
        EACH _mm256_storeu_ps(values + 8 * q, _mm256_mul_ps(y[q], all(scale)));
    }

    static inline void near_32(const __m256 (&x)[4], float divisor, __m256 (&y)[4]) {
        EACH y[q] = _mm256_add_ps(absolute(x[q]), all(divisor));
        EACH y[q] = _mm256_div_ps(x[q], y[q]);
        EACH y[q] = _mm256_fmadd_ps(y[q], all(254.0f), all(NEAR - FIRST));
    }

    static inline __m256i raised_32(__m256i codes, const __m256 (&)[4]) { return codes; }
#endif
};

struct RootMap {
    static constexpr int32_t FIRST = 0;

    static inline float near(float x, float divisor) { return fma(x, 255.0f / divisor, NEAR); }
    static inline float exact(float n) { return n * 255.0f; }
    static inline int32_t raised(int32_t code, float x) { return at_least_one(code, x); }

    static inline float value(int code, float scale) {
        const float y = fraction<255>(code) * scale;
        return y * y;
    }

    static inline void decode(const uint8_t *codes, float scale, float *values, int64_t n) {
        int64_t k = 0;
#if ONLY_AVX2
        for (; k + 32 <= n; k += 32) decode_32(codes + k, scale, values + k);
#endif
#pragma GCC ivdep
        for (; k < n; k++) values[k] = value(codes[k], scale);
    }

#if ONLY_AVX2
    static inline void decode_32(const uint8_t *codes, float scale, float *values) {
        __m256i code[4];
        __m256 y[4];
        EACH code[q] = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * q)));
        fractions_32<255>(code, y);
        EACH y[q] = _mm256_mul_ps(y[q], all(scale));
        EACH _mm256_storeu_ps(values + 8 * q, _mm256_mul_ps(y[q], y[q]));
    }

    static inline void near_32(const __m256 (&x)[4], float divisor, __m256 (&y)[4]) {
        EACH y[q] = _mm256_fmadd_ps(x[q], all(255.0f / divisor), all(NEAR));
    }

    static inline __m256i raised_32(__m256i codes, const __m256 (&x)[4]) { return at_least_one(codes, x); }
#endif
};

// Integers: floor(y + 1/2), where y is a function of a value's share of the largest one. `Map::near` gives y to MARGIN in a
// fraction of the time that `Map::exact` takes; that decides for a group with a value so near to a tie that these units
// matter, one in 40.
template <class Map, class T, bool SIGNED>
struct Integer : Coded<T, SIGNED> {
    static inline void encode(const float *values, int32_t largest, T *codes, float *scale, int64_t n) {
        if (largest >= INFINITE) return Coded<T, SIGNED>::encode_lost(values, codes, scale, n);
        const float size = float_of(largest), divisor = size > TINY ? size : TINY;
        *scale = largest == 0 ? 0.0f : divisor;
        const bool is_moderate = uint32_t(largest) - (63u << 23) < 128u << 23;  // at least 2^-64, below 2^64
        if (n < GROUP || !is_moderate || !encode_near(values, divisor, codes)) encode_exactly(values, divisor, codes, n);
    }

    static inline void decode(const T *codes, const float *scale, float *values, int64_t n) {
        Map::decode(codes, *scale, values, n);
    }

   private:
    static constexpr uint32_t ROUNDED_OFF = 0x7FFF;

#if ONLY_AVX2
    static inline bool encode_near(const float *values, float divisor, T *codes) {
        const __m256i rounded_off = _mm256_set1_epi32(ROUNDED_OFF), smallest = _mm256_set1_epi8(char(Map::FIRST));
        const __m256i lower = _mm256_set1_epi16(0xFF);
        __m256i nearest = rounded_off;
#pragma GCC unroll 1
        for (int64_t k = 0; k < GROUP; k += 32) {
            __m256 x[4], y[4];
            __m256i words[4], beyond[4];
            load_32(values + k, x);
            Map::near_32(x, divisor, y);
            EACH words[q] = _mm256_castps_si256(y[q]);
            EACH beyond[q] = _mm256_and_si256(words[q], rounded_off);
            EACH words[q] = _mm256_srli_epi32(words[q], 15);
            const __m256i first = _mm256_and_si256(_mm256_packus_epi32(words[0], words[1]), lower);
            const __m256i second = _mm256_and_si256(_mm256_packus_epi32(words[2], words[3]), lower);
            store_32(codes + k, Map::raised_32(_mm256_add_epi8(_mm256_packus_epi16(first, second), smallest), x));
            beyond[0] = _mm256_min_epi32(_mm256_min_epi32(beyond[0], beyond[1]), _mm256_min_epi32(beyond[2], beyond[3]));
            nearest = _mm256_min_epi32(nearest, beyond[0]);
        }
        return _mm256_movemask_epi8(_mm256_cmpgt_epi32(nearest, _mm256_set1_epi32(2 * MARGIN))) == -1;
    }
#else
    static inline bool encode_near(const float *values, float divisor, T *codes) {
        uint32_t nearest = ROUNDED_OFF;
#pragma GCC ivdep
        for (int64_t k = 0; k < GROUP; k++) {
            const uint32_t word = word_of(Map::near(values[k], divisor)), beyond = word & ROUNDED_OFF;
            nearest = nearest < beyond ? nearest : beyond;
            codes[k] = T(Map::raised(int32_t(word >> 15 & 0xFF) + Map::FIRST, values[k]));
        }
        return nearest > 2 * MARGIN;
    }
#endif

    static __attribute__((noinline)) void encode_exactly(const float *values, float divisor, T *codes, int64_t n) {
        for (int64_t k = 0; k < n; k++) {
            const float y = Map::exact(values[k] / divisor);
            codes[k] = T(Map::raised(int32_t(__builtin_floorf(y + 0.5f)), values[k]));
        }
    }
};


using Companded = Integer<CompandedMap, int8_t, true>;
using Root = Integer<RootMap, uint8_t, false>;
