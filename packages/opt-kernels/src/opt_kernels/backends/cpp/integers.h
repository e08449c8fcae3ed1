// Codecs of 8-bit integers: `codecs.Companded` and `codecs.Root`.

// The integer nearest to x, ties to even, |x| < 2^21, in the lower bits of a word.
static inline uint32_t nearest(float x) { return word_of(x + 0x1.8p23f); }

// The code of y, |y| <= 255, rounded stochastically: with 16 bits of its fraction, plus noise, which is odd so that a code
// whose product was rounded down stays.
static inline int32_t code_by(float y, uint32_t noise) { return (int32_t(y * 65536.0f) + int32_t(noise)) >> 16; }

#ifdef WIDE
// The codes of a block times `most`: to nearest, or by noise.
template <bool ROUNDS>
static inline __attribute__((always_inline)) void codes_of(const Floats (&y)[4], float most, const GroupNoise &noise, int64_t k, Words (&codes)[4]) {
    if constexpr (ROUNDS) {
        Words random[4];
        load_noise(noise, k, random);
        EACH codes[q] = WIDE(cvttps_epi32)(WIDE(mul_ps)(y[q], all(most * 65536.0f)));
        EACH codes[q] = WIDE(srai_epi32)(WIDE(add_epi32)(codes[q], random[q]), 16);
    } else {
        EACH codes[q] = WIDE(cvtps_epi32)(WIDE(mul_ps)(y[q], all(most)));
    }
}
#endif

template <bool SIGNED, bool ROUNDS>
struct Companded : Coded<int8_t, SIGNED, ROUNDS> {
    static constexpr int NOISE_BITS = 16;
    static constexpr bool ODD = true;

    static inline float value(int code) { return float(code) / (254.0f - __builtin_fabsf(float(code))); }

    static inline void decode(const int8_t *codes, const float *scales, float *values, int64_t n) {
        const float scale = *scales;
        int64_t k = 0;
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
        static const Table table(value);
        for (; k + 64 <= n; k += 64) {
            const __m512i part = _mm512_loadu_si512(codes + k);
            table.look_up(_mm512_abs_epi8(part), part, values + k);
            for (int64_t i = k; i < k + 64; i++) values[i] *= scale;
        }
#elif defined(WIDE)
        for (; k + BLOCK <= n; k += BLOCK) decode_block(codes + k, scale, values + k);
#endif
        for (; k < n; k++) values[k] = value(codes[k]) * scale;
    }

    static inline void encode(
        const float *values, int32_t largest, int8_t *codes, float *scale, int64_t n, const GroupNoise &noise) {
        const float size = float_of(largest), divisor = size > TINY ? size : TINY;
        // Sums with a small scale would lose bits if they were halved, and those with a large one overflow if not.
        const float factor = divisor < 1.0f ? 1.0f : 0.5f, offset = divisor * factor, most = 254.0f * factor;
        *scale = largest == 0 ? 0.0f : divisor;
        int64_t k = 0;
#ifdef WIDE
        for (; k + BLOCK <= n; k += BLOCK) encode_block(values + k, factor, offset, most, codes + k, noise, k);
#endif
#pragma GCC ivdep
        for (; k < n; k++) {
            const float y = values[k] / fma(__builtin_fabsf(values[k]), factor, offset) * most;
            if constexpr (ROUNDS) codes[k] = int8_t(code_by(y, noise[k]));
            else codes[k] = int8_t(nearest(y));
        }
    }

   private:
#ifdef WIDE
    static inline __attribute__((always_inline)) void decode_block(const int8_t *codes, float scale, float *values) {
        Floats code[4], y[4];
        load_codes(codes, code);
        EACH y[q] = WIDE(sub_ps)(all(254.0f), absolute(code[q]));
        EACH y[q] = WIDE(div_ps)(code[q], y[q]);
        EACH y[q] = WIDE(mul_ps)(y[q], all(scale));
        store_block(values, y);
    }

    static inline __attribute__((always_inline)) void encode_block(const float *values, float factor, float offset, float most, int8_t *codes,
                                    const GroupNoise &noise, int64_t k) {
        Floats x[4], y[4];
        Words code[4];
        load_block(values, x);
        EACH y[q] = WIDE(fmadd_ps)(absolute(x[q]), all(factor), all(offset));
        EACH y[q] = WIDE(div_ps)(x[q], y[q]);
        codes_of<ROUNDS>(y, most, noise, k, code);
        const Words first = WIDE(packs_epi32)(code[0], code[1]), second = WIDE(packs_epi32)(code[2], code[3]);
        store_bytes(codes, WIDE(packs_epi16)(first, second));
    }
#endif
};

template <bool SIGNED, bool ROUNDS>
struct Root : Coded<uint8_t, SIGNED, ROUNDS> {
    static constexpr int NOISE_BITS = 16;
    static constexpr bool ODD = true;

    static inline float value(int code, float scale) {
        const float root = float(code) * scale;
        return root * root;
    }

    static inline void decode(const uint8_t *codes, const float *scales, float *values, int64_t n) {
        const float scale = *scales;
        int64_t k = 0;
#ifdef WIDE
        for (; k + BLOCK <= n; k += BLOCK) decode_block(codes + k, scale, values + k);
#endif
#pragma GCC ivdep
        for (; k < n; k++) values[k] = value(codes[k], scale);
    }

    static inline void encode(
        const float *values, int32_t largest, uint8_t *codes, float *scale, int64_t n, const GroupNoise &noise) {
        const float unit = float_of(largest) / 255.0f, inverse = largest == 0 ? 0.0f : 1.0f / unit;
        *scale = unit;
        int64_t k = 0;
        int32_t smallest = 0xFF;
#ifdef WIDE
        Words each = all_words(~0u);
        // Products with the inverse of the smallest scales would overflow.
        for (; k + BLOCK <= n && (!ROUNDS || inverse < 0x1p100f); k += BLOCK)
            each = WIDE(min_epu8)(each, encode_block(values + k, inverse, codes + k, noise, k));
        smallest = has_zero(each) ? 0 : smallest;
#endif
#pragma GCC ivdep
        for (; k < n; k++) {
            const float y = values[k] * inverse;
            int32_t code;
            if constexpr (ROUNDS) code = code_by(y < 255.0f ? y : 255.0f, noise[k]);
            else code = nearest(y) & 0xFF;
            smallest = code < smallest ? code : smallest;
            codes[k] = uint8_t(code);
        }
        if (smallest == 0 && largest != 0) Root::raise_zeros(values, codes, n, 0);
    }

   private:
#ifdef WIDE
    static inline __attribute__((always_inline)) void decode_block(const uint8_t *codes, float scale, float *values) {
        Floats root[4];
        load_codes(codes, root);
        EACH root[q] = WIDE(mul_ps)(root[q], all(scale));
        EACH root[q] = WIDE(mul_ps)(root[q], root[q]);
        store_block(values, root);
    }

    static inline __attribute__((always_inline)) Words encode_block(const float *values, float inverse, uint8_t *codes, const GroupNoise &noise, int64_t k) {
        Floats x[4];
        Words code[4];
        load_block(values, x);
        codes_of<ROUNDS>(x, inverse, noise, k, code);
        const Words first = WIDE(packs_epi32)(code[0], code[1]), second = WIDE(packs_epi32)(code[2], code[3]);
        const Words bytes = WIDE(packus_epi16)(first, second);
        store_bytes(codes, bytes);
        return bytes;
    }
#endif
};

template <bool SIGNED, bool ROUNDS> using codec_companded = Companded<SIGNED, ROUNDS>;
template <bool SIGNED, bool ROUNDS> using codec_root = Root<SIGNED, ROUNDS>;
