// Products of many rows with many rows of weights of any type: what counts is the arithmetic. The weights are turned, in units (units.h), into panels
// that stay in the second-level cache, and every unit that is loaded from there meets TALL rows of x. (Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008.)
#pragma once
#include "products.h"

constexpr int TALL = W == 16 ? 12 : 6;  // rows of x at a time: with two vectors each, as many sums as there are registers for
constexpr int PANEL = 2 * W;            // rows of the weights that a panel has, side by side
constexpr int64_t DEPTH = 2048 / W;     // units of the sum, at a time: a panel fills half of a first-level cache
constexpr int64_t BREADTH = 128;        // rows of the weights at a time
constexpr int64_t WIDTH = 256;          // rows of x at most, at a time: their sums stay in the second-level cache, too

// Turns W vectors of W numbers, by squares of half the size.
template <int half = W / 2> INLINE void turn(vf* x) {
    if constexpr (half > 0) {
        vi first, second;
        for (int lane = 0; lane < W; lane++) {
            first[lane] = lane & half ? W + lane - half : lane;
            second[lane] = lane & half ? W + lane : lane + half;
        }
#pragma GCC unroll 16
        for (int row = 0; row < W; row++)
            if (!(row & half)) {
                const vf low = x[row], high = x[row + half];
                x[row] = __builtin_shuffle(low, high, first);
                x[row + half] = __builtin_shuffle(low, high, second);
            }
        turn<half / 2>(x);
    }
}

// to[unit][PANEL] = weights[.][unit] of `depth` numbers of up to PANEL rows; zeros where there is none. Returns the units.
template <class Way> int64_t turned_panel(const typename Way::Weight* weights, int64_t size, int rows, int64_t depth, float* to) {
    constexpr int64_t step = W * Way::EACH;
    const int64_t units = (depth + Way::EACH - 1) / Way::EACH;
    for (int part = 0; part < PANEL; part += W)
        for (int64_t k = 0; k < depth; k += step) {
            vf x[W];
            const int64_t unit = k / Way::EACH;
            const typename Way::Weight* from = weights + part * size + k;
            if (depth - k >= step && part + W <= rows) {
#pragma GCC unroll 16
                for (int row = 0; row < W; row++) x[row] = Way::units(from + row * size);
                turn(x);
#pragma GCC unroll 16
                for (int row = 0; row < W; row++) store(to + (unit + row) * PANEL + part, x[row]);
            } else {
                for (int row = 0; row < W; row++)
                    x[row] = part + row >= rows ? vf{} : depth - k >= step ? Way::units(from + row * size)
                                                                           : Way::last_units(from + row * size, int(depth - k));
                turn(x);
                for (int row = 0; row < W && unit + row < units; row++) store(to + (unit + row) * PANEL + part, x[row]);
            }
        }
    return units;
}

// sums [N][.., PANEL] (rows `apart`) += xs [N][depth], in units from `start`, times a panel; from zero where `begins`.
template <class Way, int N> INLINE void tile(const float* const* xs, int64_t start, int64_t depth, const float* panel, float* sums, int64_t apart, bool begins) {
    vf total[N][2];
    const float* x[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
        x[n] = xs[n] + start;
        total[n][0] = begins ? vf{} : load(sums + n * apart);
        total[n][1] = begins ? vf{} : load(sums + n * apart + W);
    }
    for (int64_t k = 0; k < depth; k++) {
        const vf left = load(panel + k * PANEL), right = load(panel + k * PANEL + W);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            const vf one = Way::everywhere(x[n] + k);
            Way::add(total[n][0], left, one);
            Way::add(total[n][1], right, one);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
        store(sums + n * apart, total[n][0]);
        store(sums + n * apart + W, total[n][1]);
    }
}

template <class Way, int N = TALL> INLINE void some_tile(int count, const float* const* xs, int64_t start, int64_t depth, const float* panel, float* sums,
                                              int64_t apart, bool begins) {
    if constexpr (N > 0) {
        if (count == N) return tile<Way, N>(xs, start, depth, panel, sums, apart, begins);
        some_tile<Way, N - 1>(count, xs, start, depth, panel, sums, apart, begins);
    }
}

// As each_product, xs in units. Each product is summed in the order of k, whatever else is computed.
template <class Way> void each_product_of_many(const typename Way::Weight* weights, int64_t first, int64_t last, int64_t size, const float* const* xs,
                                               int64_t columns, const Take& take) {
    constexpr int64_t most = DEPTH * Way::EACH;
    const int64_t blocks = (columns + WIDTH - 1) / WIDTH;
    const Buffer panels(BREADTH * DEPTH), sums((columns + blocks - 1) / blocks * BREADTH);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t left = columns * block / blocks, wide = columns * (block + 1) / blocks - left, parts = (wide + TALL - 1) / TALL;
        for (int64_t begin = first; begin < last; begin += BREADTH) {
            const int64_t rows = last - begin < BREADTH ? last - begin : BREADTH;
            for (int64_t start = 0; start < size; start += most) {
                const int64_t depth = size - start < most ? size - start : most;
                int64_t units = 0;
                for (int64_t row = 0; row < rows; row += PANEL)
                    units = turned_panel<Way>(weights + (begin + row) * size + start, size, int(rows - row < PANEL ? rows - row : PANEL), depth,
                                              &panels[row * DEPTH]);
                // Columns in equal parts: 14 are 7 and 7, not 12 and 2, whose sums would wait for each other.
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t column = wide * part / parts, some = wide * (part + 1) / parts - column;
                    for (int64_t row = 0; row < rows; row += PANEL)
                        some_tile<Way>(int(some), xs + left + column, start / Way::EACH, units,
                                       &panels[row * DEPTH], &sums[column * BREADTH + row], BREADTH, start == 0);
                }
            }
            for (int64_t column = 0; column < wide; column++) take(left + column, begin, &sums[column * BREADTH], rows);
        }
    }
}
