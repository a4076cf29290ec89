// Rows times a large matrix. Each thread has its own rows of the matrix.
#include "linear.h"

// x: [rows, size], rows `stride` apart. weight: [count, size], bias: [count] or null, out: [rows, count]; all contiguous.
API void linear(int dtype, const void* x, int64_t stride, const void* weight, const void* bias, void* out, int64_t rows, int64_t count,
                int64_t size) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        run_linear((const std::remove_pointer_t<P>*)x, stride, (const std::remove_pointer_t<P>*)weight, nullptr, (P)bias, (P)out, rows, count, size);
    });
}
