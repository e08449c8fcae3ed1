// Lion; the formula stands in reference.py.

struct Row {
    float grad_scale;
    float lr;
    float decay;    // 1 - lr * weight_decay
    float weight1;  // 1 - beta1
    float weight2;  // 1 - beta2
};

static inline float grad_scale_of(const Row &row) { return row.grad_scale; }

static inline float updated(float p, float g, float &m, float &, const Row &row) {
    float blend = fma(row.weight1, g - m, m);
    // A NaN has no sign and stays: a diverged parameter must not look like one at rest.
    float step = blend > 0.0f ? row.lr : blend < 0.0f ? -row.lr : blend;
    m = fma(row.weight2, g - m, m);
    return p * row.decay - step;
}

static int64_t sweep(const Task &task, int64_t begin, int64_t end) { return update_sweep<Row>(task, begin, end); }
