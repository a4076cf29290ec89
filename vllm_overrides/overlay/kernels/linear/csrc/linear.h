// Rows of type T times a matrix of type V, in panels if `panels`. scale: float32 [count], by which its rows are multiplied, or null.
#pragma once
#include "../../csrc/products.h"

template <class T, class V> void run_linear(const T* x, int64_t stride, const V* weight, bool panels, const float* scale, const T* bias, T* out, int64_t rows,
                                            int64_t count, int64_t size) {
    const Inputs<T> inputs(x, stride, rows, size);
    const int64_t each = rows_together(panels);
    parallel(count / each, each * rows * size, [&](int64_t first, int64_t last) {
        each_product(weight, panels, first * each, last * each, size, inputs.addresses.data(), rows, [&](int64_t column, int64_t row, float* sums, int64_t some) {
            if (scale)
                for (int64_t n = 0; n < some; n++) sums[n] *= scale[row + n];
            if (bias)
                for (int64_t n = 0; n < some; n++) sums[n] += get(bias[row + n]);
            narrow(sums, some, out + column * count + row);
        });
    });
}
