// The smallest valid source: compiled once to check that the compiler works.

static int64_t sweep(const Task &, int64_t, int64_t) { return 0; }
