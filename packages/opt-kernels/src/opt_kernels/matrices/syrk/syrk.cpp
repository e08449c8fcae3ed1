// alpha · left right + beta · added, where the product is symmetric: tiles from the diagonal down, the rest mirrored.
//
// bfloat16 with the processor's own dot products of pairs, summed in float32 in the order of k. A call has two phases:
// `right` is packed so that a pair along k is one word and 32 columns lie together; then tiles of 8 rows by 32 columns
// are computed, 16 sums in registers, of which a pair of `left` is broadcast to two vectors of `right`.

struct Product {
    int64_t phase;  // PACK: shares are blocks of 32 columns; MULTIPLY: tiles
    const uint16_t *left;
    const uint16_t *right;
    const uint16_t *added;  // may be null
    uint16_t *out;
    uint32_t *packed;  // (m / 32, k / 2, 32)
    int64_t m, k;
    int64_t left_row, right_row, right_col, added_row;  // strides, in elements
};

constexpr int64_t PACK = 0, ROWS = 8, COLS = 32;

#ifdef __AVX512BF16__
#include <immintrin.h>

extern "C" int64_t supported() { return 1; }

static inline uint32_t pair_at(const uint16_t *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

static inline __m512bh pairs(__m512i words) {
    __m512bh found;
    memcpy(&found, &words, sizeof found);
    return found;
}

static void pack(const Product &of, int64_t block) {
    const int64_t pairs_of_k = of.k / 2;
    const uint16_t *from = of.right + block * COLS * of.right_col;
    uint32_t *to = of.packed + block * pairs_of_k * COLS;
    if (of.right_col == 1) {
        for (int64_t pair = 0; pair < pairs_of_k; pair++) {
            const uint16_t *low = from + 2 * pair * of.right_row, *high = low + of.right_row;
            for (int64_t j = 0; j < COLS; j++) to[pair * COLS + j] = low[j] | uint32_t(high[j]) << 16;
        }
        return;
    }
    constexpr int64_t LINE = 16;  // words of a cache line: read whole before the next
    for (int64_t start = 0; start < pairs_of_k; start += LINE) {
        const int64_t end = smaller(start + LINE, pairs_of_k);
        for (int64_t j = 0; j < COLS; j++) {
            for (int64_t pair = start; pair < end; pair++) {
                to[pair * COLS + j] = pair_at(from + j * of.right_col + 2 * pair);
            }
        }
    }
}

// ROWS x COLS sums, two vectors a row.
static inline void sums_of(const Product &of, int64_t row, int64_t block, __m512 (&sums)[ROWS][2]) {
    const uint16_t *left = of.left + row * of.left_row;
    const uint32_t *right = of.packed + block * (of.k / 2) * COLS;
    for (int64_t i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < of.k / 2; pair++) {
        const __m512bh first = pairs(_mm512_loadu_si512(right + pair * COLS));
        const __m512bh second = pairs(_mm512_loadu_si512(right + pair * COLS + 16));
        for (int64_t i = 0; i < ROWS; i++) {
            const __m512bh here = pairs(_mm512_set1_epi32(int32_t(pair_at(left + i * of.left_row + 2 * pair))));
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], here, first);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], here, second);
        }
    }
}

static inline __m512 widened(const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

static void multiply(const Product &of, float alpha, float beta, int64_t row, int64_t block) {
    __m512 sums[ROWS][2];
    sums_of(of, row, block, sums);
    uint16_t tile[ROWS][COLS];
    for (int64_t i = 0; i < ROWS; i++) {
        for (int64_t half = 0; half < 2; half++) {
            __m512 x = _mm512_mul_ps(sums[i][half], _mm512_set1_ps(alpha));
            if (of.added) {
                const uint16_t *added = of.added + (row + i) * of.added_row + block * COLS + half * 16;
                x = _mm512_add_ps(x, _mm512_mul_ps(widened(added), _mm512_set1_ps(beta)));
            }
            const __m256bh rounded = _mm512_cvtneps_pbh(x);
            memcpy(&tile[i][half * 16], &rounded, sizeof rounded);
        }
        memcpy(of.out + (row + i) * of.m + block * COLS, tile[i], sizeof tile[i]);
    }
    if (row < (block + 1) * COLS) return;  // on the diagonal: whole
    for (int64_t j = 0; j < COLS; j++) {
        uint16_t mirrored[ROWS];
        for (int64_t i = 0; i < ROWS; i++) mirrored[i] = tile[i][j];
        memcpy(of.out + (block * COLS + j) * of.m + row, mirrored, sizeof mirrored);
    }
}

static int64_t sweep(const Task &task, int64_t begin, int64_t end) {
    const Product &of = *(const Product *)task.table;
    const float *factors = (const float *)task.extra;
    if (of.phase == PACK) {
        for (int64_t block = begin; block < end; block++) pack(of, block);
        return 0;
    }
    int64_t first = 0;  // number of the block's first tile
    for (int64_t block = 0; block < of.m / COLS && first < end; block++) {
        const int64_t top = block * (COLS / ROWS), tiles = of.m / ROWS - top;
        for (int64_t tile = larger(begin - first, 0); tile < smaller(end - first, tiles); tile++) {
            multiply(of, factors[0], factors[1], (top + tile) * ROWS, block);
        }
        first += tiles;
    }
    return 0;
}

#else

extern "C" int64_t supported() { return 0; }

static int64_t sweep(const Task &, int64_t, int64_t) { return 0; }

#endif
