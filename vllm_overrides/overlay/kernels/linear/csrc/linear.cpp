// Few rows times a large matrix. Each thread streams its own rows of the weights from memory, once; the rows of x wait in its cache, as
// float32, and share every piece of the weights that is loaded.
#include <algorithm>
#include "../../csrc/vec.h"
#include "../../csrc/rows.h"

API void linear(int dtype, const void* x, int64_t x_stride, const void* weight, const void* bias, int64_t w_stride, void* out, int64_t out_stride,
                int64_t rows, int64_t count, int64_t size) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        Rows wide = widened((const std::remove_pointer_t<P>*)x, x_stride, rows, size);
        const float* a = wide.data();
        parallel(count, rows * size, [=](int64_t first, int64_t last) {
            // As many rows of x as stay in the second-level cache while the weights pass by.
            int64_t some = std::max<int64_t>(16, (int64_t(1) << 16) / size);
            for (int64_t start = 0; start < rows; start += some)
                products((const std::remove_pointer_t<P>*)weight, w_stride, a + start * size, size, std::min(some, rows - start), size, first,
                         last, [=](int64_t row, int64_t n, float value) {
                    put((P)out + (start + row) * out_stride + n, bias ? value + get(((P)bias)[n]) : value);
                });
        });
    });
}
