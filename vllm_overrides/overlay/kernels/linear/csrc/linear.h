// Rows of type T times a matrix of type V. scale: float32 [count], by which its rows are multiplied, or null.
#pragma once
#include <type_traits>
#include "../../csrc/products.h"

template <class T, class V> void run_linear(const T* x, int64_t stride, const V* weight, const float* scale, const T* bias, T* out, int64_t rows,
                                            int64_t count, int64_t size) {
    const Inputs inputs(x, stride, rows, size);
    parallel(count, rows * size, [&](int64_t first, int64_t last) {
        const int64_t some = last - first;
        if (std::is_same<T, float>::value && !scale && !bias)
            return each_product(weight, first, last, size, inputs.rows.data(), rows, (float*)out + first, count, false);
        const Buffer sums(rows * some);
        each_product(weight, first, last, size, inputs.rows.data(), rows, sums.at, some, std::is_same<T, bf16>::value);
        for (int64_t row = 0; row < rows; row++) {
            float* from = sums.at + row * some;
            if (scale)
                for (int64_t n = 0; n < some; n++) from[n] *= scale[first + n];
            if (bias)
                for (int64_t n = 0; n < some; n++) from[n] += get(bias[first + n]);
            narrow(from, some, out + row * count + first);
        }
    });
}
