// Rows times a large matrix. Each thread has its own rows of the matrix.
#include "linear.h"

// x: [rows, size], rows `stride` apart. weight: [count, size], in panels if `panels`, bias: [count] or null, out: [rows, count]; all contiguous.
API void linear(int dtype, const void* x, int64_t stride, const void* weight, int panels, const void* bias, void* out, int64_t rows, int64_t count,
                int64_t size) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        run_linear((const std::remove_pointer_t<P>*)x, stride, (const std::remove_pointer_t<P>*)weight, panels != 0, nullptr, (P)bias, (P)out, rows, count, size);
    });
}

// weight: [count, size], of x's type; it becomes panels where it is, and packed 1, or is left alone where rows or numbers are left over. part: rows that
// are multiplied by themselves.
API void linear_pack(int dtype, void* weight, int64_t count, int64_t size, int64_t part, int32_t* packed) {
    by_type(dtype, [=](auto* type) {
        typedef std::remove_pointer_t<decltype(type)> T;
        *packed = pack<Operand<T>>((T*)weight, count, size, part);
    });
}
