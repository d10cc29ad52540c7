// Vectors of floats, and loads of KV entries in their own precision, one namespace per instruction set.
//
// Every namespace offers the same: Vector (of `width` floats) with load, set, add, multiply-add, max, exp and sums of
// four vectors at once. Attention is written once over them, in attention.inc.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_X86_VECTORS 1
#include <immintrin.h>
#endif

// For what must not leave registers.
#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define ALWAYS_INLINE_CALL __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#define ALWAYS_INLINE_CALL
#endif

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return as_float(uint32_t(value.bits) << 16); }
inline float to_float(Half value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
    const uint32_t rest = value.bits & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinite, or not a number
    if (rest < 0x0400) {  // subnormal: a multiple of 2^-24
        const float magnitude = float(rest) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return as_float(sign | ((rest << 13) + 0x38000000));
}

// Rounded to the nearest, ties to even.
inline void store(float* target, float value) { *target = value; }
inline void store(BFloat16* target, float value) {
    const uint32_t bits = as_bits(value);
    if (std::isnan(value)) {
        target->bits = uint16_t(bits >> 16 | 0x40);
    } else {
        target->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
inline void store(Half* target, float value) {
    const uint32_t bits = as_bits(value);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) {
        target->bits = sign | 0x7e00;
    } else if (magnitude >= 65520.0f) {  // half way from the largest to what would follow it
        target->bits = sign | 0x7c00;
    } else if (magnitude < 0x1p-14f) {
        target->bits = sign | uint16_t(std::nearbyint(magnitude * 0x1p24f));
    } else {
        const uint32_t rounded = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
        target->bits = sign | uint16_t((rounded - 0x38000000) >> 13);
    }
}

// e^x for x <= 0 by 2^n e^r, |r| <= ln(2) / 2; polynomial of Cephes' expf (S. L. Moshier), relative error below 2e-7.
// What is below `LOWEST` is 0 in float32 but for subnormals.
constexpr float LOWEST = -87.0f;
constexpr float LOG2_E = 1.44269504f;
constexpr float LN2_HIGH = 0.693359375f;
constexpr float LN2_LOW = -2.12194440e-4f;
constexpr float EXP_TERMS[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                               4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// The code of an element in 4 bits, two a byte.
inline float code_at(const char* codes, int64_t element) {
    return float(uint8_t(codes[element / 2]) >> 4 * (element % 2) & 15);
}

namespace portable {
struct Vector {
    static constexpr int width = 1;
    float value;

    static Vector set(float x) { return {x}; }
    template <class T>
    static Vector load(const T* source) {
        return {to_float(*source)};
    }
    template <class T>
    void store_to(T* target) const {
        store(target, value);
    }
    // A bit for every element that equals x.
    uint64_t equal(float x) const { return value == x; }
    static Vector multiply_add(Vector a, Vector b, Vector c) { return {a.value * b.value + c.value}; }
    Vector operator*(Vector other) const { return {value * other.value}; }
    Vector operator+(Vector other) const { return {value + other.value}; }
    Vector operator-(Vector other) const { return {value - other.value}; }
    Vector operator/(Vector other) const { return {value / other.value}; }
    Vector rounded() const { return {std::nearbyint(value)}; }  // ties to even
    static Vector max(Vector a, Vector b) { return {a.value > b.value ? a.value : b.value}; }
    static Vector min(Vector a, Vector b) { return {a.value < b.value ? a.value : b.value}; }
    float largest() const { return value; }
    float smallest() const { return value; }
    float sum() const { return value; }
    static Vector exp(Vector x) { return {x.value < LOWEST ? 0.0f : std::exp(x.value)}; }
    // x where the score marks an entry, -infinity where its slot is empty.
    static Vector mask_empty(Vector x, Vector score) { return {std::isinf(score.value) && score.value < 0 ? score.value : x.value}; }
    // Codes of 4 bits, two a byte, of even and odd elements; from `width` bytes.
    static void load_codes(const uint8_t* source, Vector& even, Vector& odd) { even = {float(*source & 15)}, odd = {float(*source >> 4)}; }
    // The same from half as many bytes; zeros behind them.
    static void load_few_codes(const uint8_t*, Vector& even, Vector& odd) { even = odd = {0}; }
    // The pairs of bfloat16, scale and minimum, of up to `width` entries, `stride` bytes apart; zeros behind the last.
    static void load_ranges(const char* first, int64_t, int64_t, Vector& scale, Vector& minimum) {
        uint16_t pair[2];
        std::memcpy(pair, first, sizeof pair);
        scale = {to_float(BFloat16{pair[0]})}, minimum = {to_float(BFloat16{pair[1]})};
    }
    static void sum_four(const Vector* parts, float* target) {
        for (int i = 0; i < 4; ++i) target[i] = parts[i].value;
    }
};
}  // namespace portable
