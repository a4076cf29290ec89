// What products multiply in one lane: a unit of 32 bits. It is one float32 number, or two numbers of bfloat16 where the processor multiplies these.
#pragma once
#include <type_traits>
#include "buffer.h"

// PAIRED_BY_HAND: of the variant `paired` of native_build.py, which does what AVX-512 BF16 would on processors that lack it.
#if defined(__AVX512BF16__) || defined(PAIRED_BY_HAND)
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

// What rows of type T are multiplied as.
template <class T> using Operand = std::conditional_t<PAIRED && std::is_same<T, bf16>::value, bf16, float>;

// Weights of any type, which become float32.
template <class T> struct Floats {
    typedef T Weight;
    static constexpr int EACH = 1;  // numbers in a unit

    // W units, and the last of a row: `count` < W * EACH numbers and zeros.
    INLINE vf units(const T* from) { return load(from); }
    INLINE vf last_units(const T* from, int count) { return load_part(from, count); }
    INLINE vf everywhere(const float* unit) { return all(*unit); }
    INLINE void add(vf& total, vf weights, vf x) { total += weights * x; }
};

// bf16 as they are, or int8, which become bf16 (exactly), with bf16; the sums are float32.
template <class T> struct Pairs {
    typedef T Weight;
    static constexpr int EACH = 2;

    INLINE vf units(const bf16* from) { vf x; std::memcpy(&x, from, sizeof x); return x; }
    INLINE vf units(const i8* from) { return from_two(load(from), load(from + W)); }
    INLINE vf last_units(const T* from, int count) {
        T numbers[2 * W] = {};
        std::memcpy(numbers, from, count * sizeof(T));
        return units(numbers);
    }
    INLINE vf everywhere(const float* unit) {  // all() may be arithmetic, and these bits are no number
        vi bits{};
        int32_t one;
        std::memcpy(&one, unit, sizeof one);
        return (vf)(bits + one);
    }
    INLINE void add(vf& total, vf weights, vf x) {
#if defined(__AVX512BF16__)
        total = (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)x);
#else
        total += (vf)((vu)weights << 16) * (vf)((vu)x << 16);
        total += (vf)((vu)weights & 0xffff0000) * (vf)((vu)x & 0xffff0000);
#endif
    }

    // 2 * W numbers, rounded.
    INLINE vf from_two(vf first, vf second) {
        vf pairs;
#if defined(__AVX512BF16__)
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        std::memcpy(&pairs, &both, sizeof pairs);
#else
        bf16 both[2 * W];
        store(both, first);
        store(both + W, second);
        std::memcpy(&pairs, both, sizeof pairs);
#endif
        return pairs;
    }
};
