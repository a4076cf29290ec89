// Products of a few rows, for weights that are read once: what counts is the memory. Those of many are in blocked.h.
#include "products.h"
#include "blocked.h"

namespace {

constexpr int MOST_ROWS = 4;              // of the weights, at a time
constexpr int COLUMNS = 6;                // rows of x, at a time
// Rows of x up to which memory is slower than the arithmetic: where a row of the weights has at most a KiB, and where it has more.
constexpr int64_t FEW_SHORT = 6, FEW_LONG = 3;
constexpr int64_t FAR = 1 << 18;          // bytes of weights that a thread finds in memory, not in a cache
constexpr int64_t MANY = 20;              // rows of x from which on turning the weights is worth its while
// As many sums as there are registers for: a row of the weights costs a conversion, which many columns share.
constexpr int rows_for(int64_t columns) { return W == 16 || columns <= 3 ? 4 : columns == 4 ? 3 : 2; }

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

// How R rows are read. SIDE_BY_SIDE: a vector of x meets all of them. IN_TURN: one after the other, which memory gives faster than several at a time.
enum class Read { SIDE_BY_SIDE, IN_TURN };

// Which of the R rows that follow are asked for, where they are read side by side: [from, to).
struct Ahead { int from, to; };

// out[n][r] = the products of R rows with xs[n]. One sum per product and lane, in the order of k: a product depends neither on what else is computed
// with it nor on how the rows are read.
template <class Way, int R, int N, Read read>
INLINE void products(const typename Way::Weight* const* rows, const float* const* xs, int64_t size, Ahead ahead, v4* out) {
    typedef typename Way::Weight T;
    constexpr int64_t step = W * Way::EACH, line = 64 / int64_t(sizeof(T)) < step ? step : 64 / sizeof(T);
    vf total[MOST_ROWS][N];
#pragma GCC unroll 8
    for (int row = 0; row < MOST_ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) total[row][n] = vf{};
    // The rows [from, to) at `at`, whose vectors `load_units` reads.
    auto add = [&](auto&& load_units, int64_t at, int from, int to) __attribute__((always_inline)) {
        vf weight[R];
#pragma GCC unroll 8
        for (int row = from; row < to; row++) weight[row] = load_units(rows[row] + at);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            vf x = load(xs[n] + at / Way::EACH);
#pragma GCC unroll 8
            for (int row = from; row < to; row++) Way::add(total[row][n], weight[row], x);
        }
    };
    auto whole = [](const T* from) __attribute__((always_inline)) { return Way::units(from); };
    auto add_rows = [&](int from, int to) __attribute__((always_inline)) {
        int64_t at = 0;
        for (; at + line <= size; at += line) {
            if (read == Read::SIDE_BY_SIDE)
                for (int row = ahead.from; row < ahead.to; row++) __builtin_prefetch(rows[row] + R * size + at);
            else __builtin_prefetch((const char*)(rows[from] + at) + IN_ADVANCE);
            for (int64_t k = at; k < at + line; k += step) add(whole, k, from, to);
        }
        for (; at + step <= size; at += step) add(whole, at, from, to);
        if (at < size) add([=](const T* from) __attribute__((always_inline)) { return Way::last_units(from, int(size - at)); }, at, from, to);
    };
    if constexpr (read == Read::IN_TURN) {
#pragma GCC unroll 8
        for (int row = 0; row < R; row++) add_rows(row, row + 1);
    } else add_rows(0, R);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) out[n] = sums(quarter(total[0][n]), quarter(total[1][n]), quarter(total[2][n]), quarter(total[3][n]));
}

// Of `columns` columns, 1 <= columns <= N.
template <class Way, int R, int N, Read read>
void some_products(int64_t columns, const typename Way::Weight* const* rows, const float* const* xs, int64_t size, Ahead ahead, v4* out) {
    if constexpr (N > 1)
        if (columns < N) return some_products<Way, R, N - 1, read>(columns, rows, xs, size, ahead, out);
    products<Way, R, N, read>(rows, xs, size, ahead, out);
}

// As each_product, xs in units, R rows and at most N columns at a time; columns < MANY.
template <class Way, int R, int N> void each_product_of_few(const typename Way::Weight* weights, int64_t first, int64_t last, int64_t size,
                                                            const float* const* xs, int64_t columns, const Take& take) {
    typedef typename Way::Weight T;
    constexpr int64_t taken = 64 / R * R;
    float out[MANY][taken];
    const int64_t bytes = size * int64_t(sizeof(T));
    const bool in_turn = columns <= (bytes <= 1024 ? FEW_SHORT : FEW_LONG) && (last - first) * bytes >= FAR;
    for (int64_t begin = first; begin < last; begin += taken) {
        const int64_t end = last - begin < taken ? last : begin + taken;
        for (int64_t row = begin; row < end; row += R) {
            const T* rows[R];  // at the end the last one again
            int valid = int(end - row < R ? end - row : R);
            for (int r = 0; r < R; r++) rows[r] = weights + (row + (r < valid ? r : valid - 1)) * size;
            for (int64_t column = 0; column < columns; column += N) {
                int64_t some = columns - column < N ? columns - column : N;
                v4 found[N];
                // Each part of the columns asks for its share of the rows that follow: memory works while they are multiplied.
                const Ahead ahead{int(R * column / columns), int(R * (column + some) / columns)};
                if (in_turn) some_products<Way, R, N, Read::IN_TURN>(some, rows, xs + column, size, ahead, found);
                else some_products<Way, R, N, Read::SIDE_BY_SIDE>(some, rows, xs + column, size, ahead, found);
                for (int n = 0; n < some; n++)
                    for (int r = 0; r < valid; r++) out[column + n][row - begin + r] = found[n][r];
            }
        }
        for (int64_t column = 0; column < columns; column++) take(column, begin, out[column], end - begin);
    }
}

// As each_product, xs in units.
template <class Way> void product_of_units(const typename Way::Weight* weights, bool panels, int64_t first, int64_t last, int64_t size,
                                           const float* const* xs, int64_t columns, const Take& take) {
    if (panels || columns >= MANY) return each_product_by_panels<Way>(weights, panels, first, last, size, xs, columns, take);
    // Columns in equal parts: 7 are 4 and 3, not 6 and 1, for which all weights would be converted once more.
    const int64_t parts = (columns + COLUMNS - 1) / COLUMNS, each = parts ? (columns + parts - 1) / parts : 0;
    switch (rows_for(each)) {
        case 4: return each_product_of_few<Way, 4, W == 16 ? COLUMNS : 3>(weights, first, last, size, xs, columns, take);
        case 3: return each_product_of_few<Way, 3, 4>(weights, first, last, size, xs, columns, take);
        case 2: return each <= 5 ? each_product_of_few<Way, 2, 5>(weights, first, last, size, xs, columns, take)
                                 : each_product_of_few<Way, 2, 6>(weights, first, last, size, xs, columns, take);
    }
}

}  // namespace

template <class X, class T> using WayOf = std::conditional_t<std::is_same<X, float>::value, Floats<T>, Pairs<T>>;

template <class X, class T> void each_product(const T* weights, bool panels, int64_t first, int64_t last, int64_t size, const X* const* xs,
                                              int64_t columns, const Take& take) {
    product_of_units<WayOf<X, T>>(weights, panels, first, last, size, (const float* const*)xs, columns, take);
}

template <class X, class T> bool pack(T* weights, int64_t count, int64_t size, int64_t part) {
    if (count % PANEL || part % PANEL || size % WayOf<X, T>::EACH || size == 0) return false;
    pack_panels<WayOf<X, T>>(weights, count, size);
    return true;
}

#define PRODUCTS(X, T) \
    template void each_product(const T*, bool, int64_t, int64_t, int64_t, const X* const*, int64_t, const Take&); \
    template bool pack<X>(T*, int64_t, int64_t, int64_t);

PRODUCTS(float, float)
PRODUCTS(Operand<bf16>, bf16)
PRODUCTS(float, f16)
PRODUCTS(float, i8)
#if defined(__AVX512BF16__) || defined(PAIRED_BY_HAND)
PRODUCTS(bf16, i8)
#endif
