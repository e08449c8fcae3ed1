// Formats of columns that are stored as they are. States with codes need `codecs.h` too, which takes longer to compile.

constexpr int64_t GROUP = 128;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFF;  // the bits of a float without its sign
constexpr int32_t INFINITE = 0x7F800000;    // a word from which on values are not finite
constexpr int32_t OUTLIER = 0x5D800000;     // the word of 2^60, from which on a value would spoil its group
constexpr float TINY = 0x1p-126f;

struct half {
    uint16_t bits;
};

// To one of the two neighbours, by 16 bits of noise. The lower half of an infinity is zero: it stays.
static inline void write_stochastically(bfloat16 &to, float x, uint32_t noise) {
    const uint32_t rounded = (word_of(x) + noise) >> 16;
    to.bits = uint16_t(x == x ? rounded : 0x7FC0);
}

static inline int32_t magnitude(float x) { return int32_t(word_of(x) & MAGNITUDE); }
static inline int32_t at_least(int32_t a, int32_t b) { return a > b ? a : b; }

// --- noise of states: codecs/narrow.py ------------------------------------------------------------------------------

constexpr int64_t NOISE_BLOCK = GROUP;
constexpr uint32_t GOLDEN = 0x9E3779B9;

// The noise of a group of a state, in the form that its codec takes.
struct GroupNoise {
    const uint32_t *words;
    uint32_t hash;
    bool repeats;  // whether words repeat after the codec's PERIOD: the group lies in one block of noise
    inline uint32_t operator[](int64_t k) const { return words[k] ^ hash; }
};

// --- narrow floats ----------------------------------------------------------------------------------------------------

// A float of BITS bits, MANTISSA of them for the fraction, with biased exponents.
template <int BITS, int MANTISSA, int BIAS>
struct Narrow {
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t SIGN = 1u << (BITS - 1), FIRST_NORMAL = 1u << MANTISSA;
    static constexpr uint32_t NORMAL = (128u - BIAS) << 23;  // of FIRST_NORMAL, as a word

    // Of a finite code.
    static inline float value(uint32_t code) {
        const float size = float_of((code & (SIGN - 1)) << SHIFT) * float_of((254u - BIAS) << 23);
        return float_of(word_of(size) | (code & SIGN) << (32 - BITS));
    }

    // To nearest, ties to even; of a finite y of this range. The code's unit in the last place is that of a sum with a
    // large enough power of two, which so rounds as the code must, and counts units.
    static inline uint32_t code(float y) {
        const uint32_t word = word_of(y), size = word & MAGNITUDE;
        const uint32_t exponent = (size > NORMAL ? size : NORMAL) & INFINITE, power = exponent + (SHIFT << 23);
        const uint32_t units = word_of(float_of(size) + float_of(power)) - power;
        return (units + ((exponent - NORMAL) >> SHIFT)) | (word >> (32 - BITS) & SIGN);
    }

    // To one of the two neighbours, by noise: the code with its fraction in the lower SHIFT bits, plus noise.
    static inline uint32_t code(float y, uint32_t noise) {
        const uint32_t word = word_of(y), size = word & MAGNITUDE, least = size < NORMAL ? size : NORMAL;
        const uint32_t small = uint32_t(int32_t(float_of(least) * float_of((149u + BIAS) << 23)));
        const uint32_t fixed = size < NORMAL ? small : size - ((127u - BIAS) << 23);
        return ((fixed + noise) >> SHIFT) | (word >> (32 - BITS) & SIGN);
    }
};

using Binary16 = Narrow<16, 10, 15>;

static inline float read(half x) {
    const uint32_t size = uint32_t(x.bits & 0x7FFF) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    return size >= 0x0F800000 ? float_of((size + 0x70000000) | sign) : Binary16::value(x.bits);
}

static inline void write(half &to, float x) {
    const uint32_t word = word_of(x), size = word & MAGNITUDE, special = size > INFINITE ? 0x7E00 : 0x7C00;
    to.bits = uint16_t(size >= 0x47800000 ? (word >> 16 & 0x8000) | special : Binary16::code(x));
}

// --- the codec of a state without codes, with the functions that `codecs.h` describes -----------------------------------

template <class T, bool ROUNDS = false>
struct Plain {
    using Code = T;
    static inline float *scale_at(float *scales, int64_t) { return scales; }
    static inline void decode(const T *codes, const float *, float *values, int64_t n) {
        for (int64_t k = 0; k < n; k++) values[k] = read(codes[k]);
    }
    static constexpr bool KEEPS = true, SHARES = false, STOCHASTIC = ROUNDS;
    static constexpr int64_t PERIOD = NOISE_BLOCK;
    static constexpr uint32_t FIXED = 0;
    static constexpr uint32_t taken(uint32_t word) { return word >> 16; }
    static inline float kept(float x) { return x; }
    static inline void store(T &code, float x, uint32_t noise) {
        if constexpr (STOCHASTIC) write_stochastically(code, x, noise);
        else write(code, x);
    }
    static inline void encode(const float *values, int32_t, T *codes, float *, int64_t n, const GroupNoise &noise) {
        for (int64_t k = 0; k < n; k++) store(codes[k], values[k], STOCHASTIC ? noise[k] : 0);
    }
};
