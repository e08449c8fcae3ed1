// SGD with momentum; the formula stands in reference.py. Without a buffer, NUM_STATES is 0.

struct Row {
    float grad_scale;
    float lr;
    float weight_decay;
    float momentum;
    float weight;  // of the gradient in the buffer: 1 - dampening
    float first;   // not 0 at the first step, whose buffer is the gradient
};

static inline float grad_scale_of(const Row &row) { return row.grad_scale; }

static inline float updated(float p, float g, float &buffer, float &, const Row &row) {
    g = row.weight_decay != 0.0f ? fma(p, row.weight_decay, g) : g;  // zero times an infinite p would be NaN
    if (NUM_STATES > 0) {
        float mixed = fma(buffer, row.momentum, g * row.weight);
        buffer = row.first != 0.0f ? g : mixed;
        g = NESTEROV ? fma(buffer, row.momentum, g) : buffer;
    }
    return p - row.lr * g;
}

static int64_t sweep(const Task &task, int64_t begin, int64_t end) { return update_sweep<Row>(task, begin, end); }
