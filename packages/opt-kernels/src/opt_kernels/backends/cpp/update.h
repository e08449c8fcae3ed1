// Common to all update sweeps: stochastic rounding, prefetching and the functions of formulas.
//
// Compiled once for each combination of formats, which come as macros:
//
//   GRAD, MAIN, OUT      float, bfloat16 or half; MAIN int16_t or int8_t: the remainder of a bfloat16 OUT
//   HAS_OUT              whether there is an out
//   STOCHASTIC_ROUNDING  whether a bfloat16 main is rounded stochastically

constexpr int64_t CHUNK = 4 * GROUP;  // elements that go through one stage together, in the first-level cache
constexpr int64_t PART = 64;          // elements of a group that are decoded of one state before the next one
constexpr int64_t AHEAD = CHUNK;      // elements by which groups are fetched before they are needed

// Fetches a group of elements. A group is short: the processor does not see by itself that memory is read in order.
template <class T>
static inline void prefetch(const T *values, int64_t begin) {
    const char *from = (const char *)(values + begin);
    for (int64_t k = 0; k < GROUP * int64_t(sizeof(T)); k += 64) __builtin_prefetch(from + k);
}

// --- stochastic rounding: codecs/narrow.py --------------------------------------------------------------------------

static inline uint32_t scramble(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    return (x ^ (x >> 15)) * 0x846CA68Bu;
}

static inline uint32_t mix(uint32_t x) {
    x = scramble(x);
    return x ^ (x >> 16);
}

// The noise words of mains: those of a run whose first element has the index `first`.
struct Noise {
    uint32_t base, key, next;

    Noise(int64_t first, uint32_t step) : base(uint32_t(first)) {
        const uint32_t upper = uint32_t(uint64_t(first) >> 32);
        key = mix(step + upper * GOLDEN);
        next = mix(step + (upper + 1) * GOLDEN);
    }

    inline uint32_t operator[](int64_t i) const {
        const uint32_t lower = base + uint32_t(i);
        return scramble(lower ^ (lower < base ? next : key));
    }
};

// What a codec takes of the multiples of GOLDEN: a block that may begin anywhere in a period.
template <class Codec>
struct Multiples {
    static constexpr int64_t NUM_WORDS = Codec::PERIOD + NOISE_BLOCK;
    alignas(64) uint32_t words[NUM_WORDS];
    constexpr Multiples() : words() {
        for (int64_t k = 0; k < NUM_WORDS; k++) words[k] = Codec::taken(uint32_t(k % Codec::PERIOD) * GOLDEN);
    }
};
template <class Codec> static constexpr Multiples<Codec> MULTIPLES;

// The noise of a state, counted from 1: a hash for each block of elements of the parameter, and multiples.
template <class Codec>
struct StateNoise {
    Noise blocks;
    int64_t before;  // elements of the first block that are not in the run

    StateNoise(int64_t first, uint32_t step, uint32_t state)
        : blocks(first / NOISE_BLOCK, step + state * 0x632BE5ABu), before(first % NOISE_BLOCK) {}

    // That of the elements from `at` of the run to the end of their block.
    inline GroupNoise from(int64_t at) const {
        const uint64_t place = uint64_t(before + at);  // unsigned: divided by shifts
        const uint32_t hash = Codec::taken(blocks[place / NOISE_BLOCK]) | Codec::FIXED;
        return {MULTIPLES<Codec>.words + place % Codec::PERIOD, hash, true};
    }

    // That of the group from element `at` of the run on; in `room` if it has elements of two blocks.
    inline GroupNoise group(uint32_t *room, int64_t at) const {
        return __builtin_expect(before == 0, true) ? from(at) : joined(room, at);
    }

   private:
    __attribute__((noinline)) GroupNoise joined(uint32_t *room, int64_t at) const {
        const GroupNoise head = from(at), tail = from(at + GROUP);
        const int32_t left = int32_t(GROUP - before);
        for (int32_t k = 0; k < int32_t(GROUP); k++) room[k] = head.words[k] ^ (k < left ? head.hash : tail.hash);
        return {room, 0, false};
    }
};

template <bool HasOut, bool StochasticRounding, class Main, class Out>
static inline void write_main(Main *main, Out *out, int64_t i, float x, const Noise &noise) {
    if constexpr (StochasticRounding) {
        write_stochastically(main[i], x, noise[i] >> 16);
        if constexpr (HasOut) write(out[i], x);
    } else {
        write_main<HasOut>(main, out, i, x);
    }
}

// --- functions of formulas --------------------------------------------------------------------------------------------

static inline float f_fma(float a, float b, float c) { return fma(a, b, c); }
static inline float f_sqrt(float a) { return __builtin_sqrtf(a); }
static inline float f_exp(float a) { return float(__builtin_exp(double(a))); }
static inline float f_log(float a) { return float(__builtin_log(double(a))); }
static inline float f_tanh(float a) { return float(__builtin_tanh(double(a))); }
static inline float f_power(float a, float b) { return float(__builtin_pow(double(a), double(b))); }
static inline float f_sign(float a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; }
static inline float f_absolute(float a) { return __builtin_fabsf(a); }
static inline float f_maximum(float a, float b) { return a > b || a != a ? a : b; }
static inline float f_minimum(float a, float b) { return a < b || a != a ? a : b; }

// --- roots over scalars -----------------------------------------------------------------------------------------------

// Whether `root_over` may take a product for a division by y.
static inline bool is_moderate(float y) { return y > 0x1p-40f && y < 0x1p40f; }

// x / y for a root x, correctly rounded, where `inverse` is 1 / y (Markstein 1990, theorem 8.1). Neither a root, which is 0
// or in [2^-75, 2^64), nor the error of the quotient can overflow or underflow if y is moderate. EXACT where a root of the
// group is infinite: the error would be NaN.
template <bool EXACT>
static inline float root_over(float x, float y, float inverse) {
#if defined(__FMA__) || defined(__aarch64__)
    if (!EXACT) {
        const float quotient = x * inverse, error = fma(-quotient, y, x);
        return fma(error, inverse, quotient);
    }
#endif
    return x / y;
}
