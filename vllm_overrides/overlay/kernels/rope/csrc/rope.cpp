// The rotation of q and k, a head at a time: the pairs, then a copy of the dimensions that are not turned.
#include "../../csrc/vec.h"

namespace {

template <class T> void turn(const T* x, const float* cos, const float* sin, T* out, int64_t half, int64_t size) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = get(x[i]), b = get(x[half + i]);
        put(out + i, a * cos[i] - b * sin[i]);
        put(out + half + i, b * cos[i] + a * sin[i]);
    }
    std::memcpy(out + 2 * half, x + 2 * half, (size - 2 * half) * sizeof(T));
}

template <class T>
void turn_heads(const T* x, int64_t token, int64_t head, T* out, int64_t t, int64_t heads, const float* cos, const float* sin, int64_t half,
                int64_t size) {
    for (int64_t h = 0; h < heads; h++) turn(x + t * token + h * head, cos, sin, out + (t * heads + h) * size, half, size);
}

}  // namespace

// q: [tokens, q_heads, size], tokens q_token and heads q_head apart; k likewise. cos, sin: float32 [tokens, half], contiguous, as are the
// outputs.
API void apply_rope(int dtype, const void* q, int64_t q_token, int64_t q_head, void* q_out, int64_t q_heads, const void* k, int64_t k_token,
                    int64_t k_head, void* k_out, int64_t k_heads, const float* cos, const float* sin, int64_t tokens, int64_t half,
                    int64_t size) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        parallel(tokens, (q_heads + k_heads) * (4 * half + size), [=](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++) {
                turn_heads((P)q, q_token, q_head, (P)q_out, t, q_heads, cos + t * half, sin + t * half, half, size);
                turn_heads((P)k, k_token, k_head, (P)k_out, t, k_heads, cos + t * half, sin + t * half, half, size);
            }
        });
    });
}
