// Codecs of 8-bit integers: `codecs.Companded` and `codecs.Root`.

// The integer nearest to x, ties to even, |x| < 2^21, in the lower bits of a word.
static inline uint32_t nearest(float x) { return word_of(x + 0x1.8p23f); }

// Common to both. Stochastic rounding is that of `narrow.rounded_to_integers`; the noise of a code is the float u + 3/2.
template <class T, bool SIGNED, bool ROUNDS>
struct Integers : Coded<T, SIGNED, ROUNDS> {
    static constexpr int64_t PERIOD = 32;
    static constexpr uint32_t FIXED = 0x3F800100;  // 1 + 2^-15
    static constexpr uint32_t taken(uint32_t word) { return word >> 9 & 0xFFFC << 7; }

   protected:
    // y times `factor`, with noise if there is any: the code is the nearest integer.
    static inline float unrounded(float y, float factor, const GroupNoise &noise, int64_t k) {
        if constexpr (ROUNDS) return fma(y, factor, float_of(noise[k]) - 1.5f);
        else return y * factor;
    }

#ifdef WIDE
    // Calls `encode` for each block of a group, with its first element and its noise. Returns the end of the last one.
    template <class Encode>
    INLINE int64_t encode_blocks(int64_t n, const GroupNoise &noise, Encode encode) {
        static_assert(BLOCK % PERIOD == 0, "one load of noise serves every block");
        int64_t k = 0;
        Words words[4] = {};
        if (ROUNDS) load_noise(noise, 0, words);
        if (!ROUNDS || noise.repeats) {
            for (; k + BLOCK <= n; k += BLOCK) encode(k, words);
        } else {
            for (; k + BLOCK <= n; k += BLOCK) {
                load_noise(noise, k, words);
                encode(k, words);
            }
        }
        return k;
    }

    INLINE void codes_of(const Floats (&y)[4], float factor, const Words (&noise)[4], Words (&codes)[4]) {
        Floats x[4];
        EACH {
            if constexpr (ROUNDS) x[q] = WIDE(fmadd_ps)(y[q], all(factor), WIDE(sub_ps)(Floats(noise[q]), all(1.5f)));
            else x[q] = WIDE(mul_ps)(y[q], all(factor));
        }
        EACH codes[q] = WIDE(cvtps_epi32)(x[q]);
    }
#endif
};

template <bool SIGNED, bool ROUNDS>
struct Companded : Integers<int8_t, SIGNED, ROUNDS> {
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
        k = Companded::encode_blocks(n, noise, [&](int64_t at, const Words (&words)[4]) __attribute__((always_inline)) {
            encode_block(values + at, factor, offset, most, codes + at, words);
        });
#endif
#pragma GCC ivdep
        for (; k < n; k++) {
            const float y = values[k] / fma(__builtin_fabsf(values[k]), factor, offset);
            codes[k] = int8_t(nearest(Companded::unrounded(y, most, noise, k)));
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

    INLINE void encode_block(
        const float *values, float factor, float offset, float most, int8_t *codes, const Words (&noise)[4]) {
        Floats x[4], y[4];
        Words code[4];
        load_block(values, x);
        EACH y[q] = WIDE(fmadd_ps)(absolute(x[q]), all(factor), all(offset));
        EACH y[q] = WIDE(div_ps)(x[q], y[q]);
        Companded::codes_of(y, most, noise, code);
        const Words first = WIDE(packs_epi32)(code[0], code[1]), second = WIDE(packs_epi32)(code[2], code[3]);
        store_bytes(codes, WIDE(packs_epi16)(first, second));
    }
#endif
};

template <bool SIGNED, bool ROUNDS>
struct Root : Integers<uint8_t, SIGNED, ROUNDS> {
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
        k = Root::encode_blocks(n, noise, [&](int64_t at, const Words (&words)[4]) __attribute__((always_inline)) {
            each = WIDE(min_epu8)(each, encode_block(values + at, inverse, codes + at, words));
        });
        smallest = any_below(each, 1) ? 0 : smallest;
#endif
#pragma GCC ivdep
        for (; k < n; k++) {
            const int32_t code = nearest(Root::unrounded(values[k], inverse, noise, k)) & 0xFF;
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

    INLINE Words encode_block(const float *values, float inverse, uint8_t *codes, const Words (&noise)[4]) {
        Floats x[4];
        Words code[4];
        load_block(values, x);
        Root::codes_of(x, inverse, noise, code);
        const Words first = WIDE(packs_epi32)(code[0], code[1]), second = WIDE(packs_epi32)(code[2], code[3]);
        const Words bytes = WIDE(packus_epi16)(first, second);
        store_bytes(codes, bytes);
        return bytes;
    }
#endif
};

template <bool SIGNED, bool ROUNDS> using codec_companded = Companded<SIGNED, ROUNDS>;
template <bool SIGNED, bool ROUNDS> using codec_root = Root<SIGNED, ROUNDS>;
