// Sums of squares of rows of gradients, and their zeros: one pass.
//
// A row is ROW elements of one run, from its start on; its squares are added in LANES float32 sums, these in float64.
// So the sum of a row depends neither on which thread takes it nor on how wide the processor's vectors are.

constexpr int64_t ROW = 4096, WIDTH = 16, VECTORS = 4, LANES = WIDTH * VECTORS;

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

static inline Floats read_vector(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline Floats read_vector(const bfloat16 *from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}

struct Sums {
    Floats squares[VECTORS];
    Ints zeros[VECTORS];
};

static inline void add(Sums &sums, const GRAD *grad) {
    for (int64_t i = 0; i < VECTORS; i++) {
        Floats x = read_vector(grad + i * WIDTH);
        sums.squares[i] += x * x;
        if (COUNT_ZEROS) sums.zeros[i] -= x == 0.0f;  // a comparison that holds is -1
    }
}

// Adds the row's zeros to `zeros`.
static double row_sum(const GRAD *grad, int64_t numel, int64_t &zeros) {
    Sums sums = {};
    int64_t full = numel / LANES * LANES;
    for (int64_t i = 0; i < full; i += LANES) add(sums, grad + i);
    if (full < numel) {
        GRAD last[LANES] = {};
        memcpy(last, grad + full, (numel - full) * sizeof(GRAD));
        add(sums, last);
        if (COUNT_ZEROS) zeros -= LANES - (numel - full);
    }
    double total = 0.0;
    for (int64_t lane = 0; lane < LANES; lane++) {
        total += double(sums.squares[lane / WIDTH][lane % WIDTH]);
        zeros += sums.zeros[lane / WIDTH][lane % WIDTH];
    }
    return total;
}

// Writes the sum of each row in [begin, end) to `extra`; returns their zeros. The table has addresses, then numels.
static int64_t sweep(const Task &task, int64_t begin, int64_t end) {
    double *row_sums = (double *)task.extra;
    int64_t first = 0, zeros = 0;
    for (int64_t i = 0; i < task.num_runs && first < end; i++) {
        const GRAD *grad = (const GRAD *)task.table[i];
        int64_t numel = task.table[task.num_runs + i], rows = (numel + ROW - 1) / ROW;
        for (int64_t row = larger(begin - first, 0); row < smaller(end - first, rows); row++) {
            row_sums[first + row] = row_sum(grad + row * ROW, smaller(numel - row * ROW, ROW), zeros);
        }
        first += rows;
    }
    return zeros;
}
