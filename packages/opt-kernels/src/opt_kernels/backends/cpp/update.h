// What the update sweeps share: codecs of states, stochastic rounding, and the functions of formulas.
//
// Compiled once for each combination of formats, which come as macros:
//
//   GRAD, MAIN, OUT      float, bfloat16 or half; MAIN int16_t: the remainder of a bfloat16 OUT
//   HAS_OUT, BY_CHANCE   whether there is an out; whether a bfloat16 main is rounded stochastically

constexpr int64_t GROUP = 128;  // elements that share a scale; the definitions stand in codecs.py
constexpr int64_t AHEAD = 4 * GROUP;  // elements by which groups are fetched before they are needed
constexpr float TINY = 1.17549435e-38f;

// Fetches a group of elements. A group is short: the processor does not see by itself that memory is read in order.
template <class T>
static inline void prefetch(const T *values, int64_t begin) {
    const char *from = (const char *)(values + begin);
    for (int64_t k = 0; k < GROUP * int64_t(sizeof(T)); k += 64) __builtin_prefetch(from + k);
}

struct half {
    uint16_t bits;
};

static inline float read(half x) {
    uint32_t size = uint32_t(x.bits & 0x7FFF) << 13;
    float finite = float_of(size) * 0x1p112f;
    uint32_t word = size >= 0x0F800000 ? size + 0x70000000 : word_of(finite);
    return float_of(word | (uint32_t(x.bits & 0x8000) << 16));
}

// To nearest, ties to even, below 2^16 in size; infinite from 65520 on.
static inline uint32_t finite_half(float x) {
    uint32_t word = word_of(x), size = word & 0x7FFFFFFF;
    uint32_t normal = ((size + 0xFFF + ((size >> 13) & 1)) >> 13) - (112u << 10);
    // 2^-1 has units in the last place of 2^-24, the step of subnormals: the sum rounds as they must.
    uint32_t small = word_of(float_of(size) + 0.5f) - 0x3F000000;
    return ((word >> 16) & 0x8000) | (size < 0x38800000 ? small : normal);
}

static inline uint32_t half_word(float x) {
    uint32_t word = word_of(x), size = word & 0x7FFFFFFF;
    uint32_t magnitude = size > 0x7F800000 ? 0x7E00 : 0x7C00;
    return size >= 0x47800000 ? ((word >> 16) & 0x8000) | magnitude : finite_half(x);
}

static inline void write(half &to, float x) { to.bits = uint16_t(half_word(x)); }

// --- stochastic rounding: codecs/rounding.py --------------------------------------------------------------------------

static inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static inline void write_by_chance(bfloat16 &to, float x, int64_t i, int64_t first, uint32_t step) {
    const uint32_t base = uint32_t(first), upper = uint32_t(uint64_t(first) >> 32), lower = base + uint32_t(i);
    const uint32_t key = mix(step + upper * 0x9E3779B9u), next = mix(step + (upper + 1) * 0x9E3779B9u);
    const uint32_t noise = mix(lower ^ (lower < base ? next : key)) >> 16;
    const uint32_t word = word_of(x);
    bfloat16 nearest;
    write(nearest, x);
    to.bits = (word & 0x7F800000) != 0x7F800000 ? uint16_t((word + noise) >> 16) : nearest.bits;
}

template <bool HasOut, bool ByChance, class Main, class Out>
static inline void write_main(Main *main, Out *out, int64_t i, float x, int64_t first, uint32_t step) {
    if constexpr (ByChance) {
        write_by_chance(main[i], x, i, first, step);
        if constexpr (HasOut) write(out[i], x);
    } else {
        write_main<HasOut>(main, out, i, x);
    }
}

// --- codecs ----------------------------------------------------------------------------------------------------------

// Each decodes a code under its group's scale, and encodes `n` values, at most GROUP, from element `begin`, a multiple of
// GROUP. The values come as `kept` gives them: the roots of those that are never negative.
template <class T>
struct Plain {
    using Code = T;
    static constexpr bool CODED = false;
    static inline float plain(const Code *codes, int64_t i) { return read(codes[i]); }
    static inline void store_plain(Code *codes, int64_t i, float x) { write(codes[i], x); }
    static inline float scale(const float *, int64_t) { return 1.0f; }
    static inline float decode(Code code, float) { return read(code); }
    static inline float kept(float x) { return x; }
    static inline void encode(const float *values, Code *codes, float *, int64_t begin, int64_t n) {
        for (int64_t k = 0; k < n; k++) write(codes[begin + k], values[k]);
    }
};

// max |x| as the word of a float; at least that of infinity where a value is not finite.
static inline int32_t largest_word(const float *values, int64_t n) {
    int32_t largest = 0;
    for (int64_t k = 0; k < n; k++) {
        int32_t size = int32_t(word_of(values[k]) & 0x7FFFFFFF);
        largest = size > largest ? size : largest;
    }
    return largest;
}

// Codes are finite, and below 2^15 in size.
struct Half {
    using Code = half;
    static constexpr int EXPONENT = 15;
    static constexpr float SMALLEST = 0x1p-24f;
    static inline float from(half code) {
        uint32_t size = word_of(float_of(uint32_t(code.bits & 0x7FFF) << 13) * 0x1p112f);
        return float_of(size | (uint32_t(code.bits & 0x8000) << 16));
    }
    static inline void to(half &code, float y) { code.bits = uint16_t(finite_half(y)); }
};

struct E4M3 {
    using Code = uint8_t;
    static constexpr int EXPONENT = 8;
    static constexpr float SMALLEST = 0x1p-9f;
    static inline float from(uint8_t code) {
        uint32_t size = word_of(float_of(uint32_t(code & 0x7F) << 20) * 0x1p120f);
        return float_of(size | (uint32_t(code & 0x80) << 24));
    }
    static inline void to(uint8_t &code, float y) {
        uint32_t word = word_of(y), size = word & 0x7FFFFFFF;
        uint32_t normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120u << 3);
        // 2^14 has units in the last place of 2^-9, the step of subnormals: the sum rounds as they must.
        uint32_t small = word_of(float_of(size) + 16384.0f) & 0xF;
        code = uint8_t(((word >> 24) & 0x80) | (size < 0x3C800000 ? small : normal));
    }
};

// A narrow float with a power of two as scale: `codecs.Scaled`.
template <class Float, bool SIGNED>
struct Scaled {
    using Code = typename Float::Code;
    static constexpr bool CODED = true;
    static inline float plain(const Code *, int64_t) { return 0.0f; }
    static inline void store_plain(Code *, int64_t, float) {}
    static inline float scale(const float *scales, int64_t begin) { return scales[begin / GROUP]; }
    static inline float decode(Code code, float scale) {
        float y = Float::from(code) * scale;
        return SIGNED ? y : y * y;
    }
    static inline float kept(float x) { return SIGNED ? x : __builtin_sqrtf(x); }
    static inline void encode(const float *values, Code *codes, float *scales, int64_t begin, int64_t n) {
        const int32_t largest = largest_word(values, n);
        const int32_t biased = (largest >> 23) + (1 - Float::EXPONENT), word = (biased > 1 ? biased : 1) << 23;
        const bool finite = largest < 0x7F800000;
        const float nan = float_of(0x7FC00000);
        scales[begin / GROUP] = !finite ? nan : largest == 0 ? 0.0f : float_of(word);
        // The reciprocal of a power of two is exact: its exponent is 254 less the scale's own.
        const float inverse = !finite ? nan : largest == 0 ? 1.0f : float_of((254 << 23) - word);
        for (int64_t k = 0; k < n; k++) {
            float x = values[k], y = x * inverse;
            y = y == y ? y : 0.0f;
            // Two choices of one comparison each: GCC does not vectorise a loop with `&&` in it.
            float least = x > 0.0f ? Float::SMALLEST : y;
            if (!SIGNED) y = y < least ? least : y;
            Float::to(codes[begin + k], y);
        }
    }
};

// The scale of codes that span [-scale, scale], and what values are divided by.
static inline float scale_of(int32_t largest) {
    const float size = float_of(largest);
    return largest >= 0x7F800000 ? float_of(0x7FC00000) : largest == 0 ? 0.0f : size > TINY ? size : TINY;
}

// code / DIVISOR, correctly rounded for every 8-bit code: a product, corrected by what it missed.
template <int DIVISOR>
static inline float fraction(int code) {
    constexpr float reciprocal = 1.0f / DIVISOR;
    const float c = float(code), estimate = c * reciprocal;
#if defined(__FMA__) || defined(__aarch64__)
    return fma(fma(-estimate, float(DIVISOR), c), reciprocal, estimate);
#else
    return c / DIVISOR;
#endif
}

struct Companded {
    using Code = int8_t;
    static constexpr bool CODED = true;
    static inline float plain(const Code *, int64_t) { return 0.0f; }
    static inline void store_plain(Code *, int64_t, float) {}
    static inline float scale(const float *scales, int64_t begin) { return scales[begin / GROUP]; }
    static inline float decode(Code code, float scale) {
        float y = fraction<127>(code);
        return y / (2.0f - __builtin_fabsf(y)) * scale;
    }
    static inline float kept(float x) { return x; }
    static inline void encode(const float *values, Code *codes, float *scales, int64_t begin, int64_t n) {
        const float scale = scale_of(largest_word(values, n)), divisor = scale == 0.0f ? 1.0f : scale;
        scales[begin / GROUP] = scale;
        for (int64_t k = 0; k < n; k++) {
            float y = values[k] / divisor;
            y = y == y ? y : 0.0f;
            y = y / (__builtin_fabsf(y) + 1.0f) * 254.0f;
            codes[begin + k] = int8_t(int32_t(__builtin_floorf(y + 0.5f)));
        }
    }
};

struct Root {
    using Code = uint8_t;
    static constexpr bool CODED = true;
    static inline float plain(const Code *, int64_t) { return 0.0f; }
    static inline void store_plain(Code *, int64_t, float) {}
    static inline float scale(const float *scales, int64_t begin) { return scales[begin / GROUP]; }
    static inline float decode(Code code, float scale) {
        float y = fraction<255>(code) * scale;
        return y * y;
    }
    static inline float kept(float x) { return __builtin_sqrtf(x); }
    static inline void encode(const float *values, Code *codes, float *scales, int64_t begin, int64_t n) {
        const float scale = scale_of(largest_word(values, n)), divisor = scale == 0.0f ? 1.0f : scale;
        scales[begin / GROUP] = scale;
        for (int64_t k = 0; k < n; k++) {
            float x = values[k], y = x / divisor;
            y = y == y ? y : 0.0f;
            y = __builtin_floorf(y * 255.0f + 0.5f);
            float least = x > 0.0f ? 1.0f : y;
            y = y < least ? least : y;
            codes[begin + k] = uint8_t(int32_t(y));
        }
    }
};

// --- functions of formulas --------------------------------------------------------------------------------------------

static inline float f_fma(float a, float b, float c) { return fma(a, b, c); }
static inline float f_sqrt(float a) { return __builtin_sqrtf(a); }
static inline float f_exp(float a) { return __builtin_expf(a); }
static inline float f_log(float a) { return __builtin_logf(a); }
static inline float f_sign(float a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; }
static inline float f_absolute(float a) { return __builtin_fabsf(a); }
static inline float f_maximum(float a, float b) { return a > b || a != a ? a : b; }
static inline float f_minimum(float a, float b) { return a < b || a != a ? a : b; }
