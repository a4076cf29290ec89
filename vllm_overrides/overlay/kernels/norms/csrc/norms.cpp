// The norms, a row at a time: one pass for the mean square (and the sum with the residual), one for the result.
#include <vector>
#include "../../csrc/vec.h"

namespace {

float mean_square(const float* row, int64_t size) {
    vf total{};
    int64_t at = 0;
    for (; at + W <= size; at += W) { vf x = load(row + at); total += x * x; }
    if (at < size) { vf x = load_part(row + at, int(size - at)); total += x * x; }
    return sum(total) / float(size);
}

// x (+ residual, rounded to T), as float32, into row; the rounded sum into total.
template <class T> void read(const T* x, const T* residual, T* total, float* row, int64_t size) {
    int64_t at = 0;
    for (; at + W <= size; at += W) {
        vf value = load(x + at);
        if (residual) {
            store(total + at, value + load(residual + at));
            value = load(total + at);
        }
        store(row + at, value);
    }
    for (; at < size; at++) {
        if (residual) put(total + at, get(x[at]) + get(residual[at]));
        row[at] = get(residual ? total[at] : x[at]);
    }
}

// What the normalised row is multiplied with: weight (of type 0 to 2, see by_type) plus `add`.
std::vector<float> factor_of(int dtype, const void* weight, float add, int64_t size) {
    std::vector<float> factor(size);
    by_type(dtype, [&](auto* type) {
        for (int64_t at = 0; at < size; at++) factor[at] = get(((decltype(type))weight)[at]) + add;
    });
    return factor;
}

template <class T>
void rms_norm(const T* x, int64_t stride, const T* residual, T* total, const float* factor, T* out, int64_t rows, int64_t size, float eps) {
    parallel(rows, 4 * size, [=](int64_t first, int64_t last) {
        std::vector<float> room(size);
        float* row = room.data();
        for (int64_t r = first; r < last; r++) {
            read(x + r * stride, residual ? residual + r * size : nullptr, total + r * size, row, size);
            float scale = 1.0f / std::sqrt(mean_square(row, size) + eps);
            T* to = out + r * size;
            int64_t at = 0;
            for (; at + W <= size; at += W) store(to + at, load(row + at) * scale * load(factor + at));
            for (; at < size; at++) put(to + at, row[at] * scale * factor[at]);
        }
    });
}

template <class T>
void gated_rms_norm(const float* o, const T* z, int64_t outer, int64_t inner, const float* factor, T* out, int64_t rows, int64_t heads,
                    int64_t size, float eps) {
    parallel(rows * heads, 12 * size, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const float* row = o + r * size;
            const T* gate = z + r / heads * outer + r % heads * inner;
            float scale = 1.0f / std::sqrt(mean_square(row, size) + eps);
            T* to = out + r * size;
            int64_t at = 0;
            for (; at + W <= size; at += W) store(to + at, load(row + at) * scale * load(factor + at) * silu(load(gate + at)));
            if (at < size) {
                int left = int(size - at);
                store_part(to + at, load_part(row + at, left) * scale * load_part(factor + at, left) * silu(load_part(gate + at, left)), left);
            }
        }
    });
}

}  // namespace

// x: [rows, size], rows `stride` apart. residual, total: [rows, size] or null, contiguous. weight: [size] of w_dtype.
API void rms_norm(int dtype, const void* x, int64_t stride, const void* residual, void* total, int w_dtype, const void* weight, float add,
                  void* out, int64_t rows, int64_t size, float eps) {
    std::vector<float> factor = factor_of(w_dtype, weight, add, size);
    by_type(dtype, [&](auto* type) {
        typedef decltype(type) P;
        rms_norm((P)x, stride, (P)residual, (P)total, factor.data(), (P)out, rows, size, eps);
    });
}

// o: float32 [rows, heads, size]. z: the same shape, rows `outer` and heads `inner` apart.
API void gated_rms_norm(int dtype, const float* o, const void* z, int64_t outer, int64_t inner, int w_dtype, const void* weight, void* out,
                        int64_t rows, int64_t heads, int64_t size, float eps) {
    std::vector<float> factor = factor_of(w_dtype, weight, 0, size);
    by_type(dtype, [&](auto* type) {
        typedef decltype(type) P;
        gated_rms_norm(o, (P)z, outer, inner, factor.data(), (P)out, rows, heads, size, eps);
    });
}
