// Memory for float32 numbers, and rows of any type as float32 in it.
#pragma once
#include <cstdlib>
#include <utility>
#include "vec.h"

INLINE int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Numbers from a row of `size` to the next, for rows that are read side by side: no power of two, or all would want the same lines of a cache.
INLINE int64_t row_pitch(int64_t size) { return rounded_up(size, W) + 16; }

// Uninitialised, on a line of the cache.
struct Buffer {
    float* at;
    explicit Buffer(int64_t floats) : at((float*)std::aligned_alloc(64, rounded_up(4 * floats + 1, 64))) {
        if (!at) std::abort();
    }
    Buffer(Buffer&& other) : at(std::exchange(other.at, nullptr)) {}
    ~Buffer() { std::free(at); }
    float& operator[](int64_t index) const { return at[index]; }
};

// A row times `scale`, with zeros up to a whole vector.
template <class T> void widen(const T* from, int64_t size, float* to, float scale = 1) {
    int64_t at = 0;
    for (; at + W <= size; at += W) store(to + at, load(from + at) * scale);
    if (at < size) store(to + at, load_part(from + at, int(size - at)) * scale);
}

// Back to a type.
template <class T> void narrow(const float* from, int64_t size, T* to) {
    int64_t at = 0;
    for (; at + W <= size; at += W) store(to + at, load(from + at));
    for (; at < size; at++) put(to + at, from[at]);
}
