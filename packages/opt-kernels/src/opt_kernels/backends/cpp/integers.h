// Codecs of 8-bit integers: `codecs.Companded` and `codecs.Root`.

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
