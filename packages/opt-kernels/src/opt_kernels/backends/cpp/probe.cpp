// A small source: compiled once to check that the compiler works and keeps to IEEE 754.

static int64_t sweep(const Task &, int64_t, int64_t) { return 0; }

extern "C" void numbers(const float *in, float *out) {
    out[0] = (in[0] + in[1]) - in[1];
    out[1] = in[2] * in[2] + in[3];
    out[2] = in[4] / in[5];
    const float nan = (in[0] - in[0]) / (in[0] - in[0]);
    out[3] = nan != nan ? 1.0f : 0.0f;
}
