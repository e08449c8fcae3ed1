// Codecs of states, as `opt_kernels/codecs/codec.py` defines them: a group of codes under one scale at a time. What they
// have in common; the codecs are in `narrow.h` and `integers.h`.
//
// Loops are written so that compilers vectorise them for any processor. What they vectorise badly, conversions of half,
// look-ups of bytes and packing, has a second version for processors with instructions for it, with the same results.
//
// Each codec has:
//
//   scale_at(scales, begin)                     where the scale of the group from element `begin` is
//   decode(codes, scale, values, n)             writes the n values, at most GROUP, of a group
//   kept(x)                                     what is encoded of a state: its root where it is never negative
//   KEEPS                                       whether kept(x) is x
//   SHARES                                      whether the values of a group share a scale
//   STOCHASTIC                                  whether it rounds stochastically, else to nearest
//   PERIOD                                      elements after which noise repeats within a block of it
//   taken(word), FIXED                          the bits that it takes of a noise word, and those that its noise always has
//   encode(values, largest, codes, scale, n, noise)
//                                               writes codes and scale; `largest` is max |value|, as the word of a float,
//                                               and below OUTLIER where a scale is shared; `noise` is of the group

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
#define WIDE(operation) _mm512_##operation
using Floats = __m512;
using Words = __m512i;
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDE(operation) _mm256_##operation
using Floats = __m256;
using Words = __m256i;
#endif

#ifdef WIDE
// A block is four registers of elements. Each operation is written for all four before the next one, because a processor
// does not look far enough ahead to overlap four chains of operations that come one after the other.
// Where a compiler neither unrolls nor inlines, it passes blocks through memory, at several times the time.
#define EACH _Pragma("GCC unroll 4") for (int q = 0; q < 4; q++)
#define INLINE static inline __attribute__((always_inline))
constexpr int64_t LANES = sizeof(Floats) / sizeof(float), BLOCK = 4 * LANES;

static inline Floats all(float x) { return WIDE(set1_ps)(x); }
static inline Words all_words(uint32_t x) { return WIDE(set1_epi32)(int(x)); }
static inline Floats absolute(Floats x) { return Floats(Words(x) & all_words(MAGNITUDE)); }

// The noise of a block, from element k of a group on.
static inline void load_noise(const GroupNoise &noise, int64_t k, Words (&words)[4]) {
    EACH words[q] = Words(WIDE(loadu_ps)((const float *)(noise.words + k + LANES * q))) ^ all_words(noise.hash);
}

static inline void load_block(const float *values, Floats (&x)[4]) { EACH x[q] = WIDE(loadu_ps)(values + LANES * q); }
static inline void store_block(float *values, const Floats (&x)[4]) { EACH WIDE(storeu_ps)(values + LANES * q, x[q]); }

// The codes of a block as floats.
template <class Code>
static inline void load_codes(const Code *codes, Floats (&x)[4]) {
    EACH {
        __m128i part = {};
        memcpy(&part, codes + LANES * q, LANES);
        x[q] = WIDE(cvtepi32_ps)(Code(-1) < 0 ? WIDE(cvtepi8_epi32)(part) : WIDE(cvtepu8_epi32)(part));
    }
}

// Writes bytes that packing has left in the order of its quarters.
static inline void store_bytes(void *codes, Words bytes) {
#if defined(__AVX512BW__)
    const Words order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, bytes));
#else
    const Words order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((Words *)codes, _mm256_permutevar8x32_epi32(bytes, order));
#endif
}

static inline bool any_below(Words bytes, uint8_t limit) {
#if defined(__AVX512BW__)
    return _mm512_cmplt_epu8_mask(bytes, _mm512_set1_epi8(char(limit))) != 0;
#else
    const Words below = _mm256_min_epu8(bytes, _mm256_set1_epi8(char(limit - 1)));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, below)) != 0;
#endif
}
#endif

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

static inline uint32_t bits(half code) { return code.bits; }
static inline uint32_t bits(uint8_t code) { return code; }
static inline void set(half &code, uint32_t bits) { code.bits = uint16_t(bits); }
static inline void set(uint8_t &code, uint32_t bits) { code = uint8_t(bits); }
static inline void set(int8_t &code, uint32_t bits) { code = int8_t(bits); }

// Common to all codecs with scales.
template <class T, bool SIGNED, bool ROUNDS>
struct Coded {
    using Code = T;
    static inline float *scale_at(float *scales, int64_t begin) { return scales + begin / GROUP; }
    static constexpr bool KEEPS = SIGNED, SHARES = true, STOCHASTIC = ROUNDS;
    static inline float kept(float x) { return SIGNED ? x : __builtin_sqrtf(x); }

    // Raises codes of zero where the root of a state is above zero; where that is -0, the code becomes `negative_zero`.
    static __attribute__((noinline)) void raise_zeros(const float *values, Code *codes, int64_t n, uint32_t negative_zero) {
#pragma GCC ivdep
        for (int64_t k = 0; k < n; k++) {
            const uint32_t code = bits(codes[k]), raised = word_of(values[k]) >> 31 ? negative_zero : values[k] > 0.0f;
            set(codes[k], code == 0 ? raised : code);
        }
    }
};
