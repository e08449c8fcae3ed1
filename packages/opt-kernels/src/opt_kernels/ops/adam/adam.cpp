// Adam and AdamW; the formula stands in reference.py.
//
// With TE_ORDER 0 every operation is torch's fused AdamW's, in its order: where all is float32, so are the bits, but for
// what torch computes one element at a time, and for processors without fused products.

struct Row {
    float grad_scale;
    float decay;         // decoupled, torch's order: 1 - lr * weight_decay; else weight_decay
    float weight1;       // 1 - beta1
    float beta2;
    float weight2;       // 1 - beta2
    float correction1;   // TE_ORDER: 1 - beta1^t
    float correction2;   // TE_ORDER: 1 - beta2^t; else its root
    float step_size;     // TE_ORDER: lr; else lr / (1 - beta1^t)
    float eps;
};

static inline float grad_scale_of(const Row &row) { return row.grad_scale; }

static inline float updated(float p, float g, float &m, float &v, const Row &row) {
    const bool decays = row.decay != 0.0f;  // zero times an infinite p would be NaN
    if (!DECOUPLED) g = decays ? fma(p, row.decay, g) : g;
    if (DECOUPLED && !TE_ORDER) p *= row.decay;
    m = fma(row.weight1, g - m, m);
    v = fma(row.weight2 * g, g, v * row.beta2);
    if (TE_ORDER) {
        float u = (m / row.correction1) / (__builtin_sqrtf(v / row.correction2) + row.eps);
        return p - row.step_size * (DECOUPLED && decays ? u + row.decay * p : u);
    }
    return p - row.step_size * m / (__builtin_sqrtf(v) / row.correction2 + row.eps);
}

static int64_t sweep(const Task &task, int64_t begin, int64_t end) { return update_sweep<Row>(task, begin, end); }
