// Rows times a large matrix. Each thread streams its own rows of the weights from memory, once; the rows of x wait in its cache, as float32,
// and share every piece of the weights that is loaded.
#include <type_traits>
#include "../../csrc/products.h"

// x: [rows, size], rows `stride` apart. weight: [count, size], bias: [count] or null, out: [rows, count]; all contiguous.
API void linear(int dtype, const void* x, int64_t stride, const void* weight, const void* bias, void* out, int64_t rows, int64_t count,
                int64_t size) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        const Inputs inputs((const std::remove_pointer_t<P>*)x, stride, rows, size);
        parallel(count, rows * size, [&](int64_t first, int64_t last) {
            each_product((const std::remove_pointer_t<P>*)weight, first, last, size, inputs.rows.data(), rows,
                         [=](int64_t row, int64_t n, float value) { put((P)out + row * count + n, bias ? value + get(((P)bias)[n]) : value); });
        });
    });
}
