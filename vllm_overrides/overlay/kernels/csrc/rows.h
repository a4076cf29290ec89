// Products of a few float32 rows with the rows of a matrix in memory, in blocks that fit the registers.
#pragma once
#include <memory>
#include <type_traits>
#include "vec.h"

// Uninitialised room for float32 numbers.
class Rows {
public:
    explicit Rows(int64_t count) : room(new float[count ? count : 1]) {}
    float* data() const { return room.get(); }
private:
    std::unique_ptr<float[]> room;
};

// [rows, size], `stride` apart, as float32 without gaps.
template <class T> Rows widened(const T* x, int64_t stride, int64_t rows, int64_t size) {
    Rows out(rows * size);
    for (int64_t r = 0; r < rows; r++) {
        const T* from = x + r * stride;
        float* to = out.data() + r * size;
        int64_t at = 0;
        for (; at + W <= size; at += W) store(to + at, load(from + at));
        for (; at < size; at++) to[at] = get(from[at]);
    }
    return out;
}

// R rows of w times M rows of x; each pair has one vector of sums, so that its order does not depend on R and M.
template <int R, int M, class T, class F>
INLINE void product_block(const T* w, int64_t w_stride, const float* x, int64_t x_stride, int64_t size, int64_t n, int64_t m, F&& put_value) {
    vf sums[R][M] = {};
    int64_t at = 0;
    for (; at + W <= size; at += W) {
        vf a[M];
        for (int j = 0; j < M; j++) a[j] = load(x + j * x_stride + at);
        for (int i = 0; i < R; i++) {
            vf b = load(w + i * w_stride + at);
            for (int j = 0; j < M; j++) sums[i][j] += b * a[j];
        }
    }
    int left = int(size - at);
    for (int i = 0; left && i < R; i++) {
        vf b = load_part(w + i * w_stride + at, left);
        for (int j = 0; j < M; j++) sums[i][j] += b * load_part(x + j * x_stride + at, left);
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < M; j++) put_value(m + j, n + i, sum(sums[i][j]));
}

// put_value(row of x, row of w, their product) for all rows of x and the rows first to last of w.
template <class T, class F>
INLINE void products(const T* w, int64_t w_stride, const float* x, int64_t x_stride, int64_t rows, int64_t size, int64_t first, int64_t last,
                     F&& put_value) {
    constexpr int R = 4;
    int64_t n = first;
    for (; n + R <= last; n += R) {
        const T* block = w + n * w_stride;
        int64_t m = 0;
        for (; m + 2 <= rows; m += 2) product_block<R, 2>(block, w_stride, x + m * x_stride, x_stride, size, n, m, put_value);
        if (m < rows) product_block<R, 1>(block, w_stride, x + m * x_stride, x_stride, size, n, m, put_value);
    }
    for (; n < last; n++)
        for (int64_t m = 0; m < rows; m++) product_block<1, 1>(w + n * w_stride, w_stride, x + m * x_stride, x_stride, size, n, m, put_value);
}
