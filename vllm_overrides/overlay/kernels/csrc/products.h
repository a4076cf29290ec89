// Products of a few rows of float32 with many rows of weights of any type, for weights that are read once: what counts is the memory.
#pragma once
#include <vector>
#include "buffer.h"

constexpr int ROWS = 4;                    // of the weights, at a time
constexpr int COLUMNS = W == 16 ? 6 : 3;   // rows of x, at a time: as many sums as there are registers for
constexpr int64_t COLUMN_TILE = 48;        // rows of x that stay in the second-level cache, at 2,048 numbers

typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

INLINE v4 quarter(vf x) {
    v4 part[W / 4];
    std::memcpy(part, &x, sizeof x);
    for (int width = W / 8; width > 0; width /= 2)
        for (int at = 0; at < width; at++) part[at] += part[at + width];
    return part[0];
}

// The sums of four vectors.
INLINE v4 sums(v4 a, v4 b, v4 c, v4 d) {
    v4 ab = __builtin_shuffle(a, b, i4{0, 4, 2, 6}) + __builtin_shuffle(a, b, i4{1, 5, 3, 7});
    v4 cd = __builtin_shuffle(c, d, i4{0, 4, 2, 6}) + __builtin_shuffle(c, d, i4{1, 5, 3, 7});
    return __builtin_shuffle(ab, cd, i4{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, i4{2, 3, 6, 7});
}

// out[n] = the products of four rows with xs[n]. One sum per product and lane, in the order of k: a product does not depend on what else is
// computed with it. `fetch`: ask for the four rows that follow.
template <int N, bool fetch, class T> INLINE void products(const T* const* rows, const float* const* xs, int64_t size, v4* out) {
    constexpr int64_t line = 64 / sizeof(T) < W ? W : 64 / sizeof(T);
    vf total[ROWS][N];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) total[row][n] = vf{};
    auto add = [&](auto&& read, int64_t at) __attribute__((always_inline)) {
        vf weight[ROWS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) weight[row] = read(rows[row] + at);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            vf x = load(xs[n] + at);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) total[row][n] += weight[row] * x;
        }
    };
    auto whole = [](const T* from) __attribute__((always_inline)) { return load(from); };
    int64_t at = 0;
    for (; at + line <= size; at += line) {
        if (fetch)
            for (int row = 0; row < ROWS; row++) __builtin_prefetch(rows[row] + ROWS * size + at);
        for (int64_t k = at; k < at + line; k += W) add(whole, k);
    }
    for (; at + W <= size; at += W) add(whole, at);
    if (at < size) add([=](const T* from) __attribute__((always_inline)) { return load_part(from, int(size - at)); }, at);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) out[n] = sums(quarter(total[0][n]), quarter(total[1][n]), quarter(total[2][n]), quarter(total[3][n]));
}

template <bool fetch, class T> void some_products(int columns, const T* const* rows, const float* const* xs, int64_t size, v4* out) {
    switch (columns) {
        case 1: return products<1, fetch>(rows, xs, size, out);
        case 2: return products<2, fetch>(rows, xs, size, out);
        case 3: return products<3, fetch>(rows, xs, size, out);
#if defined(__AVX512F__)
        case 4: return products<4, fetch>(rows, xs, size, out);
        case 5: return products<5, fetch>(rows, xs, size, out);
        case 6: return products<6, fetch>(rows, xs, size, out);
#endif
    }
}

// take(column, row, product) for each of the weights' rows [first, last) and each column.
// weights: [.., size], rows without gaps. xs: `columns` addresses of `size` numbers and zeros up to a multiple of W.
template <class T, class F> void each_product(const T* weights, int64_t first, int64_t last, int64_t size, const float* const* xs,
                                              int64_t columns, F take) {
    for (int64_t tile = 0; tile < columns; tile += COLUMN_TILE) {
        int64_t end = tile + COLUMN_TILE < columns ? tile + COLUMN_TILE : columns;
        for (int64_t row = first; row < last; row += ROWS) {
            const T* rows[ROWS];  // at the end the last one again
            int valid = int(last - row < ROWS ? last - row : ROWS);
            for (int r = 0; r < ROWS; r++) rows[r] = weights + (row + (r < valid ? r : valid - 1)) * size;
            for (int64_t column = tile; column < end; column += COLUMNS) {
                int some = int(end - column < COLUMNS ? end - column : COLUMNS);
                v4 out[COLUMNS];
                if (column == tile) some_products<true>(some, rows, xs + column, size, out);
                else some_products<false>(some, rows, xs + column, size, out);
                for (int n = 0; n < some; n++)
                    for (int r = 0; r < valid; r++) take(column + n, row + r, out[n][r]);
            }
        }
    }
}

// x [count, size], rows `stride` apart, as each_product takes it.
struct Inputs {
    Buffer room;
    std::vector<const float*> rows;
    template <class T> Inputs(const T* x, int64_t stride, int64_t count, int64_t size) : room(count * rounded_up(size, W)) {
        const int64_t wide = rounded_up(size, W);
        for (int64_t row = 0; row < count; row++) rows.push_back(room.at + row * wide);
        parallel(count, size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) widen(x + row * stride, size, room.at + row * wide);
        });
    }
};
