// Memory for float32 numbers, and rows of any type as float32 in it.
#pragma once
#include <cstdlib>
#include <utility>
#include <vector>
#include "vec.h"

INLINE int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Numbers of type X from a row of `size` to the next, for rows that are read side by side: whole vectors, and no power of two, or all would want
// the same lines of a cache.
template <class X> int64_t row_pitch(int64_t size) { return rounded_up(size, 64 / int64_t(sizeof(X))) + 64 / int64_t(sizeof(X)); }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool KEEPS = false;  // a sanitizer is to see where memory ends
#else
constexpr bool KEEPS = true;
#endif

// What a thread gave back and will ask for again: pages that are new each time cost a tenth of a large product.
class Spare {
    struct Piece { float* at; int64_t floats; };
    std::vector<Piece> pieces;

public:
    Piece take(int64_t floats) {
        auto best = pieces.end(), last = pieces.end();
        for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
            if (piece->floats >= floats && (best == pieces.end() || piece->floats < best->floats)) best = piece;
            if (last == pieces.end() || piece->floats > last->floats) last = piece;
        }
        const bool fits = best != pieces.end();
        Piece found{nullptr, 0};
        if (fits || last != pieces.end()) {
            found = fits ? *best : *last;
            pieces.erase(fits ? best : last);
        }
        if (!fits) {
            std::free(found.at);
            const int64_t bytes = rounded_up(4 * floats + 1, 64);
            found = {(float*)std::aligned_alloc(64, bytes), bytes / 4};
            if (!found.at) std::abort();
        }
        return found;
    }
    void give(float* at, int64_t floats) {
        if (KEEPS) pieces.push_back({at, floats});
        else std::free(at);
    }
    ~Spare() { for (const Piece& piece : pieces) std::free(piece.at); }
};
inline thread_local Spare spare;

// Uninitialised, on a line of the cache.
class Buffer {
    int64_t floats;

public:
    float* at;
    explicit Buffer(int64_t wanted) {
        const auto piece = spare.take(wanted);
        at = piece.at;
        floats = piece.floats;
    }
    Buffer(Buffer&& other) : floats(other.floats), at(std::exchange(other.at, nullptr)) {}
    ~Buffer() { if (at) spare.give(at, floats); }
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
