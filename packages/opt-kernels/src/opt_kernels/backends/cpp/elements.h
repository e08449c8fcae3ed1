// Common to all sweeps: stored numbers, runs of them, and how a call traverses its runs.
//
// Nothing here may depend on where a run is cut or on how wide the processor's vectors are: products are contracted
// only where `fma` says so, and every operation is rounded as IEEE 754 has it.

#include <cstdint>
#include <cstring>

struct bfloat16 {
    uint16_t bits;
};

static inline uint32_t word_of(float x) {
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

static inline float float_of(uint32_t word) {
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

static inline float read(float x) { return x; }
static inline float read(bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }

static inline void write(float &to, float x) { to = x; }

// To nearest, ties to even; any NaN becomes the quiet one.
static inline void write(bfloat16 &to, float x) {
    uint32_t word = word_of(x);
    uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    to.bits = uint16_t(x == x ? rounded : 0x7FC0);
}

// The main of element i; a remainder and its weight are the halves of one word (codecs/narrow.py). Without
// an out its address is null, and nothing may be added to it.
template <class Main, class Out>
static inline float read_main(const Main *main, const Out *, int64_t i) { return read(main[i]); }

static inline float read_main(const int16_t *remainder, const bfloat16 *weight, int64_t i) {
    return float_of((uint32_t(weight[i].bits) << 16) + uint32_t(int32_t(remainder[i])));
}

static inline float read_main(const int8_t *remainder, const bfloat16 *weight, int64_t i) {
    return float_of(((uint32_t(weight[i].bits) << 8) + uint32_t(int32_t(remainder[i]))) << 8);
}

template <bool HasOut, class Main, class Out>
static inline void write_main(Main *main, Out *out, int64_t i, float x) {
    write(main[i], x);
    if constexpr (HasOut) write(out[i], x);
}

template <bool>
static inline void write_main(int16_t *remainder, bfloat16 *weight, int64_t i, float x) {
    uint32_t word = word_of(x);
    weight[i].bits = uint16_t(x == x ? (word + 0x8000) >> 16 : 0x7FC0);
    remainder[i] = int16_t(x == x ? word & 0xFFFF : 0);
}

// To nearest, ties to even, in 24 bits, which are then split (codecs/short_remainder.py).
template <bool>
static inline void write_main(int8_t *remainder, bfloat16 *weight, int64_t i, float x) {
    uint32_t word = word_of(x);
    uint32_t rounded = (word + 0x7F + ((word >> 8) & 1)) >> 8;
    weight[i].bits = uint16_t(x == x ? (rounded + 0x80) >> 8 : 0x7FC0);
    remainder[i] = int8_t(x == x ? rounded & 0xFF : 0);
}

// a * b + c, rounded once; without an instruction for it in double, where rounding the sum twice matters once in 2^29.
static inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return float(double(a) * double(b) + double(c));
#endif
}

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A call, as `threads.py` makes it. Every thread that enters `work` takes shares until none is left.
struct Task {
    const int64_t *table;
    int64_t num_runs;
    void *extra;  // the table of hyper-parameters, or where results go
    int64_t total;
    int64_t num_shares;
    int64_t next;
    int64_t result;  // sum of what the shares return
};

// Sweeps [begin, end) of all runs laid end to end. Each source defines it.
static int64_t sweep(const Task &task, int64_t begin, int64_t end);

extern "C" void work(Task *task) {
    for (;;) {
        int64_t share = __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED);
        if (share >= task->num_shares) return;
        int64_t result = sweep(*task, task->total * share / task->num_shares, task->total * (share + 1) / task->num_shares);
        __atomic_fetch_add(&task->result, result, __ATOMIC_RELAXED);
    }
}
