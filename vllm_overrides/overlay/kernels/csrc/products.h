// Products of rows with many rows of weights of any type (float, bf16, f16, i8).
#pragma once
#include <functional>
#include <vector>
#include "units.h"

constexpr int64_t PANEL = 2 * W;  // rows of weights side by side in a panel

// sums: `count` products of the weights' rows from `row` on with a column; they may be changed.
typedef std::function<void(int64_t column, int64_t row, float* sums, int64_t count)> Take;

// Calls `take` with the products of the weights' rows [first, last) and each column. A product depends neither on other rows nor on other columns,
// but for one thing: where the weights are rows, whether the columns are fewer than 20.
// weights: [.., size], in rows without gaps, or as `pack` leaves them if `panels`; first and last are then whole panels. xs: `columns` addresses of `size`
// numbers and zeros up to a whole vector; X is the Operand of their type.
template <class X, class T> void each_product(const T* weights, bool panels, int64_t first, int64_t last, int64_t size, const X* const* xs,
                                              int64_t columns, const Take& take);

// Packs [count, size] into panels where it is, for columns of type X. False, and nothing done, where rows or numbers are left over; rows that are
// multiplied by themselves are `part` rows.
template <class X, class T> bool pack(T* weights, int64_t count, int64_t size, int64_t part);

// Rows that a thread takes at a time.
INLINE int64_t rows_together(bool panels) { return panels ? PANEL : 1; }

// `count` rows of `size` numbers of type X, uninitialised.
template <class X> struct Rows {
    const int64_t pitch;
    const Buffer room;
    std::vector<const X*> addresses;
    Rows(int64_t count, int64_t size) : pitch(row_pitch<X>(size)), room((count * pitch * int64_t(sizeof(X)) + 3) / 4) {
        for (int64_t row = 0; row < count; row++) addresses.push_back((*this)[row]);
    }
    X* operator[](int64_t row) const { return (X*)room.at + row * pitch; }
};

// x [count, size], rows `stride` apart, as each_product takes it.
template <class T> struct Inputs : Rows<Operand<T>> {
    Inputs(const T* x, int64_t stride, int64_t count, int64_t size) : Rows<Operand<T>>(count, size) {
        parallel(count, size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) {
                const T* from = x + row * stride;
                if constexpr (std::is_same<Operand<T>, float>::value) widen(from, size, (*this)[row]);
                else {
                    std::memcpy((*this)[row], from, size * sizeof(T));
                    std::memset((*this)[row] + size, 0, (this->pitch - size) * sizeof(T));
                }
            }
        });
    }
};
