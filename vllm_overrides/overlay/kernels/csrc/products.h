// Products of rows of float32 with many rows of weights of any type (float, bf16, f16, i8).
#pragma once
#include <vector>
#include "buffer.h"

// out[column * apart + row - first] = the product of each of the weights' rows [first, last) with each column. It depends neither on other rows
// nor on other columns, but for one thing: whether these are fewer than 20.
// weights: [.., size], rows without gaps. xs: `columns` addresses of `size` numbers and zeros up to a multiple of W. brief: these may be rounded to
// bfloat16, for the model's type is no finer.
template <class T> void each_product(const T* weights, int64_t first, int64_t last, int64_t size, const float* const* xs, int64_t columns,
                                     float* out, int64_t apart, bool brief);

// x [count, size], rows `stride` apart, as each_product takes it.
struct Inputs {
    Buffer room;
    std::vector<const float*> rows;
    template <class T> Inputs(const T* x, int64_t stride, int64_t count, int64_t size) : room(count * row_pitch(size)) {
        const int64_t wide = row_pitch(size);
        for (int64_t row = 0; row < count; row++) rows.push_back(room.at + row * wide);
        parallel(count, size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) widen(x + row * stride, size, room.at + row * wide);
        });
    }
};
