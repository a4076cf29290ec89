// Decay and write strength of every token and head.
#include "../../csrc/vec.h"

namespace {

// log(1 + u) for 0 <= u <= 1 as 2 artanh(u / (2 + u)): a series in a number of at most 1/9, exact to rounding also where u is tiny.
vf log1p_of_fraction(vf u) {
    vf s = u / (2.0f + u), t = s * s;
    vf series = t * (1.0f / 15) + 1.0f / 13;
    series = series * t + 1.0f / 11;
    series = series * t + 1.0f / 9;
    series = series * t + 1.0f / 7;
    series = series * t + 1.0f / 5;
    series = series * t + 1.0f / 3;
    series = series * t + 1.0f;
    return 2.0f * s * series;
}

vf softplus(vf x) {
    vf magnitude = choose(x < 0.0f, -x, x);
    return maximum(x, vf{}) + log1p_of_fraction(exp(-magnitude));
}

template <class T>
void gate(const T* a, int64_t a_stride, const T* b, int64_t b_stride, const float* A_log, const float* dt_bias, float* g, float* beta,
          int64_t tokens, int64_t heads) {
    parallel(tokens, 60 * heads, [=](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            const T *from_a = a + t * a_stride, *from_b = b + t * b_stride;
            float *to_g = g + t * heads, *to_beta = beta + t * heads;
            int64_t h = 0;
            for (; h + W <= heads; h += W) {
                store(to_g + h, -exp(load(A_log + h)) * softplus(load(from_a + h) + load(dt_bias + h)));
                store(to_beta + h, sigmoid(load(from_b + h)));
            }
            if (h < heads) {
                int left = int(heads - h);
                vf x = load_part(from_a + h, left) + load_part(dt_bias + h, left);
                store_part(to_g + h, -exp(load_part(A_log + h, left)) * softplus(x), left);
                store_part(to_beta + h, sigmoid(load_part(from_b + h, left)), left);
            }
        }
    });
}

}  // namespace

// a, b: [tokens, heads], rows a_stride and b_stride apart. A_log, dt_bias: float32 [heads]. g, beta: float32 [tokens, heads].
API void delta_gate(int dtype, const void* a, int64_t a_stride, const void* b, int64_t b_stride, const float* A_log, const float* dt_bias,
                    float* g, float* beta, int64_t tokens, int64_t heads) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        gate((P)a, a_stride, (P)b, b_stride, A_log, dt_bias, g, beta, tokens, heads);
    });
}
