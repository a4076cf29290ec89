// Products with panels of weights: PANEL rows side by side, unit (units.h) after unit, each of which meets TALL rows of x. (Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication", 2008.) Weights in rows are turned into panels that stay in the second-level cache, which is worth
// its while for many rows of x; those that were packed once serve any number of them. Each product is summed in the order of k, whatever else is computed.
#pragma once
#include <algorithm>
#include "products.h"

constexpr int TALL = W == 16 ? 12 : 6;  // rows of x at a time: with two vectors each, as many sums as there are registers for
constexpr int64_t DEPTH = 2048 / W;     // units of the sum, at a time: a panel fills half of a first-level cache
constexpr int64_t BREADTH = 128;        // rows of the weights at a time
constexpr int64_t IN_ADVANCE = 2048;    // bytes after which memory has answered
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

// to[unit][PANEL] = row_at(.)[unit] of `depth` numbers of up to PANEL rows; zeros where there is none.
template <class Way, class RowAt> void turned_panel(RowAt row_at, int rows, int64_t depth, float* to) {
    constexpr int64_t step = W * Way::EACH;
    const int64_t units = (depth + Way::EACH - 1) / Way::EACH;
    for (int part = 0; part < PANEL; part += W)
        for (int64_t k = 0; k < depth; k += step) {
            vf x[W];
            const int64_t unit = k / Way::EACH;
            if (depth - k >= step && part + W <= rows) {
#pragma GCC unroll 16
                for (int row = 0; row < W; row++) x[row] = Way::units(row_at(part + row) + k);
                turn(x);
#pragma GCC unroll 16
                for (int row = 0; row < W; row++) store(to + (unit + row) * PANEL + part, x[row]);
            } else {
                for (int row = 0; row < W; row++)
                    x[row] = part + row >= rows ? vf{} : depth - k >= step ? Way::units(row_at(part + row) + k)
                                                                           : Way::last_units(row_at(part + row) + k, int(depth - k));
                turn(x);
                for (int row = 0; row < W && unit + row < units; row++) store(to + (unit + row) * PANEL + part, x[row]);
            }
        }
}

// W units of a panel: P is float where they are as they are multiplied, and else the weights' type.
template <class Way, class P> INLINE vf units_of(const P* from) {
    if constexpr (std::is_same<P, float>::value) return load(from);
    else return Way::units(from);
}

// What a panel of type P has of a unit.
template <class Way, class P> constexpr int64_t each_of() { return std::is_same<P, float>::value ? 1 : Way::EACH; }

// Bytes of weights that are asked for while others are multiplied: `step` per unit from `at` on, at most 128.
struct Soon { const char* at; int64_t step; };

// sums [N][.., PANEL] (rows `apart`) += xs [N][depth], in units from `start`, times a panel; from zero where `begins`.
template <class Way, int N, class P> INLINE void tile(const float* const* xs, int64_t start, int64_t depth, const P* panel, float* sums, int64_t apart,
                                                      bool begins, Soon soon) {
    constexpr int64_t part = W * each_of<Way, P>();
    vf total[N][2];
    const float* x[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
        x[n] = xs[n] + start;
        total[n][0] = begins ? vf{} : load(sums + n * apart);
        total[n][1] = begins ? vf{} : load(sums + n * apart + W);
    }
    for (int64_t k = 0; k < depth; k++) {
        const P* at = panel + k * 2 * part;
        __builtin_prefetch(soon.at + k * soon.step);
        __builtin_prefetch(soon.at + k * soon.step + 64);
        const vf left = units_of<Way>(at), right = units_of<Way>(at + part);
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

template <class Way, class P, int N = TALL> INLINE void some_tile(int count, const float* const* xs, int64_t start, int64_t depth, const P* panel,
                                                                  float* sums, int64_t apart, bool begins, Soon soon) {
    if constexpr (N > 0) {
        if (count == N) return tile<Way, N>(xs, start, depth, panel, sums, apart, begins, soon);
        some_tile<Way, P, N - 1>(count, xs, start, depth, panel, sums, apart, begins, soon);
    }
}

// As each_product, xs in units.
template <class Way> void each_product_by_panels(const typename Way::Weight* weights, bool panels, int64_t first, int64_t last, int64_t size,
                                                 const float* const* xs, int64_t columns, const Take& take) {
    if (columns == 0) return;
    typedef typename Way::Weight T;
    constexpr bool as_they_are = sizeof(T) * Way::EACH == sizeof(float);
    const int64_t units = (size + Way::EACH - 1) / Way::EACH, blocks = (columns + WIDTH - 1) / WIDTH;
    const Buffer made(PANEL * DEPTH), sums((columns + blocks - 1) / blocks * BREADTH);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t left = columns * block / blocks, wide = columns * (block + 1) / blocks - left, parts = (wide + TALL - 1) / TALL;
        const bool at_once = panels && parts == 1, made_first = !panels || (!as_they_are && !at_once);
        const int64_t most = at_once ? units : DEPTH;
        for (int64_t begin = first; begin < last; begin += BREADTH) {
            const int64_t rows = last - begin < BREADTH ? last - begin : BREADTH;
            for (int64_t row = 0; row < rows; row += PANEL)
                for (int64_t start = 0; start < units; start += most) {
                    const int64_t depth = units - start < most ? units - start : most;
                    const T* piece = weights + (begin + row) * size + start * Way::EACH * (panels ? PANEL : 1);
                    // Memory works all the time: the parts share what is asked for, of a panel the piece that follows this one.
                    const int64_t bytes = panels ? PANEL * Way::EACH * int64_t(sizeof(T)) : 0;
                    auto each_part = [&](const auto* from) {
                        // Columns in equal parts: 14 are 7 and 7, not 12 and 2, whose sums would wait for each other.
                        for (int64_t part = 0; part < parts; part++) {
                            const int64_t column = wide * part / parts, some = wide * (part + 1) / parts - column;
                            const Soon soon{(const char*)piece + (at_once ? IN_ADVANCE : depth * bytes + depth * bytes * part / parts), bytes / parts};
                            some_tile<Way>(int(some), xs + left + column, start, depth, from, &sums[column * BREADTH + row], BREADTH, start == 0, soon);
                        }
                    };
                    if (!panels)
                        turned_panel<Way>([=](int number) { return piece + number * size; }, int(std::min<int64_t>(rows - row, PANEL)),
                                          std::min(size - start * Way::EACH, depth * Way::EACH), made.at);
                    else if (made_first)
                        for (int64_t at = 0; at < depth * PANEL; at += W) store(&made[at], Way::units(piece + at * Way::EACH));
                    if (made_first) each_part((const float*)made.at);
                    else each_part(piece);
                }
            for (int64_t column = 0; column < wide; column++) take(left + column, begin, &sums[column * BREADTH], rows);
        }
    }
}

// Packs `count` rows, whole panels of them, of whole units, where they are.
template <class Way> void pack_panels(typename Way::Weight* weights, int64_t count, int64_t size) {
    struct Unit { typename Way::Weight numbers[Way::EACH]; };
    const int64_t units = size / Way::EACH;
    parallel(count / PANEL, PANEL * size, [&](int64_t first, int64_t last) {
        const Buffer room((PANEL * size * int64_t(sizeof(typename Way::Weight)) + 3) / 4);
        Unit* to = (Unit*)room.at;
        for (int64_t panel = first; panel < last; panel++) {
            Unit* from = (Unit*)(weights + panel * PANEL * size);
            for (int64_t unit = 0; unit < units; unit++)
                for (int64_t row = 0; row < PANEL; row++) to[unit * PANEL + row] = from[row * units + unit];
            std::memcpy((void*)from, to, PANEL * size * sizeof(typename Way::Weight));
        }
    });
}
