// Codecs of 8-bit integers: `codecs.Companded` and `codecs.Root`.

// The integer nearest to x, ties to even, |x| < 2^21, in the lower bits of a word.
static inline uint32_t nearest(float x) { return word_of(x + 0x1.8p23f); }

// Stochastic rounding: `narrow.rounded_to_integers`. The noise of an integer code is the float base + u.

#ifdef WIDE
// The codes of a block times `most`: to nearest, or by noise, with the base added.
template <bool ROUNDS>
INLINE void codes_of(const Floats (&y)[4], float most, const GroupNoise &noise, int64_t k, Words (&codes)[4]) {
    if constexpr (ROUNDS) {
        Words random[4];
        load_noise(noise, k, random);
        EACH codes[q] = WIDE(cvttps_epi32)(WIDE(fmadd_ps)(y[q], all(most), Floats(random[q])));
    } else {
        EACH codes[q] = WIDE(cvtps_epi32)(WIDE(mul_ps)(y[q], all(most)));
    }
}
#endif

template <bool SIGNED, bool ROUNDS>
struct Companded : Coded<int8_t, SIGNED, ROUNDS> {
    static constexpr uint32_t FIXED = 0x43000002;  // 128 + 2^-15
    static constexpr uint32_t taken(uint32_t word) { return word >> 16 & 0xFFFC; }

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
            const float y = values[k] / fma(__builtin_fabsf(values[k]), factor, offset);
            if constexpr (ROUNDS) codes[k] = int8_t(int32_t(fma(y, most, float_of(noise[k]))) - 128);
            else codes[k] = int8_t(nearest(y * most));
        }
    }

   private:
#ifdef WIDE
    INLINE void decode_block(const int8_t *codes, float scale, float *values) {
        Floats code[4], y[4];
        load_codes(codes, code);
        EACH y[q] = WIDE(sub_ps)(all(254.0f), absolute(code[q]));
        EACH y[q] = WIDE(div_ps)(code[q], y[q]);
        EACH y[q] = WIDE(mul_ps)(y[q], all(scale));
        store_block(values, y);
    }

    INLINE void encode_block(const float *values, float factor, float offset, float most, int8_t *codes,
                             const GroupNoise &noise, int64_t k) {
        Floats x[4], y[4];
        Words code[4];
        load_block(values, x);
        EACH y[q] = WIDE(fmadd_ps)(absolute(x[q]), all(factor), all(offset));
        EACH y[q] = WIDE(div_ps)(x[q], y[q]);
        codes_of<ROUNDS>(y, most, noise, k, code);
        const Words first = WIDE(packs_epi32)(code[0], code[1]), second = WIDE(packs_epi32)(code[2], code[3]);
        if constexpr (ROUNDS) store_bytes(codes, WIDE(packus_epi16)(first, second) ^ WIDE(set1_epi8)(char(0x80)));
        else store_bytes(codes, WIDE(packs_epi16)(first, second));
    }
#endif
};

template <bool SIGNED, bool ROUNDS>
struct Root : Coded<uint8_t, SIGNED, ROUNDS> {
    static constexpr uint32_t FIXED = 0x3F800100;  // 1 + 2^-15
    static constexpr uint32_t taken(uint32_t word) { return word >> 9 & 0xFFFC << 7; }

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
        for (; k + BLOCK <= n; k += BLOCK)
            each = WIDE(min_epu8)(each, encode_block(values + k, inverse, codes + k, noise, k));
        smallest = has_zero(each) ? 0 : smallest;
#endif
#pragma GCC ivdep
        for (; k < n; k++) {
            int32_t code;
            if constexpr (ROUNDS) {
                code = int32_t(fma(values[k], inverse, float_of(noise[k]))) - 1;
                code = code < 255 ? code : 255;
            } else {
                code = nearest(values[k] * inverse) & 0xFF;
            }
            smallest = code < smallest ? code : smallest;
            codes[k] = uint8_t(code);
        }
        if (smallest == 0 && largest != 0) Root::raise_zeros(values, codes, n, 0);
    }

   private:
#ifdef WIDE
    INLINE void decode_block(const uint8_t *codes, float scale, float *values) {
        Floats root[4];
        load_codes(codes, root);
        EACH root[q] = WIDE(mul_ps)(root[q], all(scale));
        EACH root[q] = WIDE(mul_ps)(root[q], root[q]);
        store_block(values, root);
    }

    INLINE Words encode_block(const float *values, float inverse, uint8_t *codes, const GroupNoise &noise, int64_t k) {
        Floats x[4];
        Words code[4];
        load_block(values, x);
        codes_of<ROUNDS>(x, inverse, noise, k, code);
        const Words base = WIDE(set1_epi16)(short(ROUNDS));
        const Words first = WIDE(sub_epi16)(WIDE(packs_epi32)(code[0], code[1]), base);
        const Words second = WIDE(sub_epi16)(WIDE(packs_epi32)(code[2], code[3]), base);
        const Words bytes = WIDE(packus_epi16)(first, second);
        store_bytes(codes, bytes);
        return bytes;
    }
#endif
};

template <bool SIGNED, bool ROUNDS> using codec_companded = Companded<SIGNED, ROUNDS>;
template <bool SIGNED, bool ROUNDS> using codec_root = Root<SIGNED, ROUNDS>;
