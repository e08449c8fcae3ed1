// Codecs of narrow floats: fp16 and fp8 under scales that are powers of two.

using E4M3 = Narrow<8, 3, 7>;
using E5M2 = Narrow<8, 2, 15>;

// `Halves` are the floats of a register in fp16; `whole` joins two of them to a register.
#if defined(WIDE) && defined(__AVX512BW__)
#define HALVES
using Halves = __m256i;
static inline Words whole(Halves first, Halves second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}
#elif defined(WIDE) && defined(__F16C__)
#define HALVES
using Halves = __m128i;
static inline Words whole(Halves first, Halves second) { return _mm256_set_m128i(second, first); }
#endif

#ifdef HALVES
// Stores a block in fp16. Returns the magnitudes of its two registers of codes, the smaller ones.
template <int ROUNDING>
static inline Words store_halves(half *codes, const Floats (&x)[4]) {
    const Words first = whole(WIDE(cvtps_ph)(x[0], ROUNDING), WIDE(cvtps_ph)(x[1], ROUNDING));
    const Words second = whole(WIDE(cvtps_ph)(x[2], ROUNDING), WIDE(cvtps_ph)(x[3], ROUNDING));
    WIDE(storeu_ps)((float *)codes, Floats(first));
    WIDE(storeu_ps)((float *)(codes + 2 * LANES), Floats(second));
    const Words size = WIDE(set1_epi16)(0x7FFF);
    return WIDE(min_epu16)(first & size, second & size);
}

static inline bool any_half_below(Words halves, uint16_t limit) {
#if defined(__AVX512BW__)
    return _mm512_cmplt_epu16_mask(halves, _mm512_set1_epi16(short(limit))) != 0;
#else
    const Words below = _mm256_min_epu16(halves, _mm256_set1_epi16(short(limit - 1)));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi16(halves, below)) != 0;
#endif
}
#endif

// A code's float under its scale; squared where the code is that of a root.
template <bool SIGNED>
static inline float scaled(float x, float scale) {
    const float y = x * scale;
    return SIGNED ? y : y * y;
}

#if defined(__AVX2__) && defined(__F16C__)
template <bool SIGNED>
static inline void widen_8(__m128i halves, float scale, float *values) {
    const __m256 y = _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(scale));
    _mm256_storeu_ps(values, SIGNED ? y : _mm256_mul_ps(y, y));
}

// Halves of codes in their upper bytes.
static inline __m256i halves_of(E5M2, __m256i codes) { return codes; }
static inline float scale_of_halves(E5M2, float scale) { return scale; }

// Halves of an exponent that is 8 less.
static inline __m256i halves_of(E4M3, __m256i codes) {
    return _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(short(0xBFFF)));
}
static inline float scale_of_halves(E4M3, float scale) { return scale * 256.0f; }
#endif

template <class Float, bool SIGNED>
static inline void widen(const uint8_t *codes, float scale, float *values, int64_t n) {
    int64_t k = 0;
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
    static const Table table(Float::value);
    for (; k + 64 <= n; k += 64) {
        const __m512i part = _mm512_loadu_si512(codes + k);
        table.look_up(part, part, values + k);  // the upper bit of an index is not looked at
        for (int64_t i = k; i < k + 64; i++) values[i] = scaled<SIGNED>(values[i], scale);
    }
#elif defined(__AVX2__) && defined(__F16C__)
    const float factor = scale_of_halves(Float(), scale);
    const __m256i zero = _mm256_setzero_si256();
    for (; k + 32 <= n && factor < 0x1p127f; k += 32) {
        const __m256i part = _mm256_loadu_si256((const __m256i *)(codes + k));
        const __m256i first = halves_of(Float(), _mm256_unpacklo_epi8(zero, part));
        const __m256i second = halves_of(Float(), _mm256_unpackhi_epi8(zero, part));
        widen_8<SIGNED>(_mm256_castsi256_si128(first), factor, values + k);
        widen_8<SIGNED>(_mm256_castsi256_si128(second), factor, values + k + 8);
        widen_8<SIGNED>(_mm256_extracti128_si256(first, 1), factor, values + k + 16);
        widen_8<SIGNED>(_mm256_extracti128_si256(second, 1), factor, values + k + 24);
    }
#endif
    for (; k < n; k++) values[k] = scaled<SIGNED>(Float::value(codes[k]), scale);
}

template <class Float, bool SIGNED>
static inline void widen(const half *codes, float scale, float *values, int64_t n) {
    int64_t k = 0;
#ifdef HALVES
    for (; k + LANES <= n; k += LANES) {
        Halves part;
        memcpy(&part, codes + k, sizeof part);
        const Floats y = WIDE(mul_ps)(WIDE(cvtph_ps)(part), all(scale));
        WIDE(storeu_ps)(values + k, SIGNED ? y : WIDE(mul_ps)(y, y));
    }
#endif
    for (; k < n; k++) values[k] = scaled<SIGNED>(Float::value(codes[k].bits), scale);
}

#ifdef WIDE
// Stores a block of codes with the signs of its values, and returns it. Signs are seen in words saturated to bytes, four
// times as many at a time.
template <class Float, bool SIGNED>
static inline Words store_signed(Words bytes, const Words (&words)[4], uint8_t *codes) {
    if (SIGNED) {
        const Words first_signs = WIDE(packs_epi32)(words[0], words[1]), second_signs = WIDE(packs_epi32)(words[2], words[3]);
        bytes |= WIDE(packs_epi16)(first_signs, second_signs) & WIDE(set1_epi8)(char(Float::SIGN));
    }
    store_bytes(codes, bytes);
    return bytes;
}

// A block of codes, as `narrow` has them, of values that are rounded without being scaled: `normal` is the word of the
// smallest value whose code is normal. A sum's exponent and units are halves of its word, which one product of integers
// joins.
template <class Float, bool SIGNED>
static inline Words narrow_block(const float *values, uint32_t normal, uint8_t *codes) {
    constexpr int SHIFT = Float::SHIFT, ROOM = SHIFT - 16;
    Floats x[4];
    Words words[4], code[4];
    load_block(values, x);
    EACH words[q] = Words(x[q]);
    EACH {
        const Words power = WIDE(max_epi32)(words[q] & all_words(INFINITE), all_words(normal));
        const Floats sum = WIDE(fmadd_ps)(Floats(power), all(float(1 << SHIFT)), SIGNED ? absolute(x[q]) : x[q]);
        code[q] = WIDE(madd_epi16)(Words(sum), all_words(1 << 16 | 1 << ROOM));
    }
    const Words least = WIDE(set1_epi16)(short((normal + (uint32_t(SHIFT) << 23)) >> 16));
    const Words first = WIDE(sub_epi16)(WIDE(packs_epi32)(code[0], code[1]), least);
    const Words second = WIDE(sub_epi16)(WIDE(packs_epi32)(code[2], code[3]), least);
    const Words bytes = WIDE(packus_epi16)(WIDE(srli_epi16)(first, ROOM), WIDE(srli_epi16)(second, ROOM));
    return store_signed<Float, SIGNED>(bytes, words, codes);
}
#endif

// Writes the codes of values times `factor`, a power of two. Returns whether any of them is zero.
template <class Float, bool SIGNED>
static inline bool narrow(const float *values, float factor, uint8_t *codes, int64_t n) {
    int64_t k = 0;
    int32_t smallest = 0xFF;
#ifdef WIDE
    // NORMAL over a power of two; of moderate ones, so that sums are finite and normal.
    const uint32_t power = word_of(factor), normal = Float::NORMAL + (127u << 23) - power;
    const bool is_moderate = power - (63u << 23) < 128u << 23;
    Words each = all_words(~0u);
    for (; k + BLOCK <= n && is_moderate; k += BLOCK)
        each = WIDE(min_epu8)(each, narrow_block<Float, SIGNED>(values + k, normal, codes + k));
    smallest = any_below(each, 1) ? 0 : smallest;
#endif
#pragma GCC ivdep
    for (; k < n; k++) {
        const int32_t code = int32_t(Float::code(values[k] * factor));
        smallest = code < smallest ? code : smallest;
        codes[k] = uint8_t(code);
    }
    return smallest == 0;
}

template <class Float, bool SIGNED>
static inline bool narrow(const float *values, float factor, half *codes, int64_t n) {
    int64_t k = 0;
    bool any_zero = false;
#ifdef HALVES
    Words each = all_words(~0u);
    for (; k + BLOCK <= n; k += BLOCK) {
        Floats x[4];
        load_block(values + k, x);
        EACH x[q] = WIDE(mul_ps)(x[q], all(factor));
        each = WIDE(min_epu16)(each, store_halves<_MM_FROUND_TO_NEAREST_INT>(codes + k, x));
    }
    any_zero = any_half_below(each, 1);
#endif
    for (; k < n; k++) {
        const uint32_t code = Float::code(values[k] * factor);
        any_zero |= code == 0;
        codes[k].bits = uint16_t(code);
    }
    return any_zero;
}

// Stochastic rounding. From the smallest normal number on, a code is the upper bits of a word with noise, except for its
// bias. Below it words have smaller units than codes, so that noise lifts fewer of them to it than it should: a block in
// which a code is below the first normal one is rounded again, unless all such codes are those of zeros.
template <class Float, class Code>
static inline bool narrow_few(
    const float *values, float factor, Code *codes, int64_t begin, int64_t n, const GroupNoise &noise) {
    int32_t smallest = 0xFFFF;
#pragma GCC ivdep
    for (int64_t k = begin; k < n; k++) {
        const uint32_t below = noise[k] & ((1u << Float::SHIFT) - 1);  // the noise without what is FIXED
        const int32_t code = int32_t(Float::code(values[k] * factor, below));
        smallest = code < smallest ? code : smallest;
        set(codes[k], uint32_t(code));
    }
    return smallest == 0;
}

#ifdef WIDE
// Whether any magnitude of a block is below `least`, but not zero, which wraps around.
static inline bool any_small(const Words (&words)[4], uint32_t least) {
    Words smallest = all_words(~0u);
    EACH {
        const Words wrapped = WIDE(sub_epi32)(words[q] & all_words(MAGNITUDE), all_words(1));
        smallest = WIDE(min_epu32)(smallest, wrapped);
    }
#if defined(__AVX512BW__)
    return _mm512_cmplt_epu32_mask(smallest, all_words(least - 1)) != 0;
#else
    const Words below = _mm256_min_epu32(smallest, all_words(least - 2));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(smallest, below)) != 0;
#endif
}

// The bytes of a block of magnitudes less that of the smallest normal number, with noise. Sums below zero become zero.
template <class Float>
static inline Words with_noise(const Words (&above)[4], const Words (&noise)[4]) {
    Words code[4];
    EACH code[q] = WIDE(srai_epi32)(WIDE(add_epi32)(above[q], noise[q]), Float::SHIFT);
    const Words first = WIDE(packs_epi32)(code[0], code[1]), second = WIDE(packs_epi32)(code[2], code[3]);
    return WIDE(packus_epi16)(first, second);
}

// Differences of magnitudes from `least`, that of the smallest normal number: for those below it in units of codes, too.
static inline void in_units_of_codes(const Words (&words)[4], uint32_t least, Words (&above)[4]) {
    const Floats units = all(float_of((277u << 23) - least));  // 2^23 of them are the smallest normal number
    Floats size[4];
    EACH size[q] = WIDE(min_ps)(absolute(Floats(words[q])), all(float_of(least)));
    EACH size[q] = WIDE(mul_ps)(size[q], units);
    EACH above[q] = WIDE(max_epi32)(above[q], all_words(0));
    EACH above[q] = WIDE(add_epi32)(above[q], WIDE(cvttps_epi32)(size[q]));
    EACH above[q] = WIDE(sub_epi32)(above[q], all_words(1u << 23));
}
#endif

// `narrow` with noise. Returns whether any code is zero.
template <class Float, bool SIGNED>
static inline bool narrow(const float *values, float factor, uint8_t *codes, int64_t n, const GroupNoise &noise) {
    int64_t k = 0;
    bool any_zero = false;
#ifdef WIDE
    // NORMAL over a power of two, as in the version without noise.
    const uint32_t power = word_of(factor), least = Float::NORMAL + (127u << 23) - power;
    const bool is_moderate = power - (63u << 23) < 128u << 23;
    for (; k + BLOCK <= n && is_moderate; k += BLOCK) {
        Floats x[4];
        Words words[4], above[4], random[4];
        load_block(values + k, x);
        load_noise(noise, k, random);
        EACH words[q] = Words(x[q]);
        EACH above[q] = WIDE(sub_epi32)(words[q] & all_words(MAGNITUDE), all_words(least));
        Words bytes = with_noise<Float>(above, random);
        if (__builtin_expect(any_below(bytes, Float::FIRST_NORMAL), false)) {
            if (any_small(words, least)) {
                in_units_of_codes(words, least, above);
                bytes = with_noise<Float>(above, random);
            }
            any_zero |= any_below(bytes, 1);
        }
        store_signed<Float, SIGNED>(bytes, words, codes + k);
    }
#endif
    return narrow_few<Float>(values, factor, codes, k, n, noise) || any_zero;
}

template <class Float, bool SIGNED>
static inline bool narrow(const float *values, float factor, half *codes, int64_t n, const GroupNoise &noise) {
    int64_t k = 0;
    bool any_zero = false;
#ifdef HALVES
    // A conversion that truncates drops the bits below the code's last one.
    for (; k + BLOCK <= n; k += BLOCK) {
        Floats x[4];
        Words words[4], random[4];
        load_block(values + k, x);
        load_noise(noise, k, random);
        EACH words[q] = Words(WIDE(mul_ps)(x[q], all(factor)));
        EACH x[q] = Floats(WIDE(add_epi32)(words[q], random[q]));
        const Words sizes = store_halves<_MM_FROUND_TO_ZERO>(codes + k, x);
        if (__builtin_expect(any_half_below(sizes, Float::FIRST_NORMAL), false)) {
            any_zero |= any_half_below(sizes, 1);
            if (any_small(words, Float::NORMAL)) any_zero |= narrow_few<Float>(values, factor, codes, k, k + BLOCK, noise);
        }
    }
#endif
    return narrow_few<Float>(values, factor, codes, k, n, noise) || any_zero;
}

// --- codecs -----------------------------------------------------------------------------------------------------------

// A narrow float under a power of two, by which it is at most 2^EXPONENT: `codecs.Scaled`.
template <class T, class Float, int EXPONENT, bool SIGNED, bool ROUNDS>
struct Scaled : Coded<T, SIGNED, ROUNDS> {
    static constexpr int64_t PERIOD = NOISE_BLOCK;
    static constexpr uint32_t FIXED = sizeof(T) == 1 ? 1u << 23 : 0;  // bytes count from the smallest normal number
    static constexpr uint32_t taken(uint32_t word) { return word >> (32 - Float::SHIFT); }

    static inline void decode(const T *codes, const float *scale, float *values, int64_t n) {
        widen<Float, SIGNED>(codes, *scale, values, n);
    }

    static inline void encode(
        const float *values, int32_t largest, T *codes, float *scale, int64_t n, const GroupNoise &noise) {
        const int32_t biased = ((largest - 1) >> 23) + (1 - EXPONENT), word = (biased > 1 ? biased : 1) << 23;
        *scale = largest == 0 ? 0.0f : float_of(word);
        // The reciprocal of a power of two is exact: its exponent is 254 less the scale's own.
        const float factor = float_of((254 << 23) - word);
        bool any_zero;
        if constexpr (ROUNDS) any_zero = narrow<Float, SIGNED>(values, factor, codes, n, noise);
        else any_zero = narrow<Float, SIGNED>(values, factor, codes, n);
        if (!SIGNED && any_zero && largest != 0) Scaled::raise_zeros(values, codes, n, Float::SIGN);
    }
};

template <bool SIGNED, bool ROUNDS> using codec_half = Scaled<half, Binary16, 15, SIGNED, ROUNDS>;
template <bool SIGNED, bool ROUNDS> using codec_e4m3 = Scaled<uint8_t, E4M3, 8, SIGNED, ROUNDS>;
template <bool SIGNED, bool ROUNDS> using codec_e5m2 = Scaled<uint8_t, E5M2, 15, SIGNED, ROUNDS>;
