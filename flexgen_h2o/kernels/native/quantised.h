// Matrices in 4-bit groups: value = minimum + scale * code, a scale and a minimum for 64 inputs of an output.
//
// In memory 16 outputs lie together, a strip. A strip holds, group by group of its inputs, 16 scales and 16 minimums in
// bfloat16, then the codes in blocks of 8 inputs: 64 bytes, a word of 32 bits for each output, in whose lower half are
// the codes of the block's inputs 0, 2, 4, 6 and in whose upper half those of inputs 1, 3, 5, 7, lowest bits first. So
// a shift brings the codes of two neighbouring inputs to where the processor's dot product wants a pair of values.

#pragma once

#include <cstdint>

#include "vectors.h"

constexpr int STRIP = 16;  // outputs
constexpr int GROUP = 64;  // inputs
constexpr int BLOCK = 8;   // inputs
constexpr int LEVELS = 15;
constexpr int BLOCK_BYTES = 64;
constexpr int RANGES_BYTES = 64;  // of a group's scales and minimums
constexpr int PANEL = 64;         // outputs of a panel, as oneDNN has them
constexpr int DEPTH = 16;         // steps of 4 bytes along the inputs to which a panel is padded

inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t groups_of(int64_t inputs) { return divided_up(inputs, GROUP); }

// Where a group begins in its strip: all groups before it are whole.
inline int64_t group_start(int64_t group) { return group * (RANGES_BYTES + GROUP / BLOCK * BLOCK_BYTES); }

inline int64_t strip_bytes(int64_t inputs) {
    return groups_of(inputs) * RANGES_BYTES + divided_up(inputs, BLOCK) * BLOCK_BYTES;
}

extern "C" {

// Values to be quantised, row by row.
struct Quantisation {
    const void* values;  // [outputs, inputs], rows `stride` elements apart
    uint8_t* target;     // strips, or a row after the other: codes, two a byte, then the groups' scales and minimums
    const float* cuts;   // [clips], shares of a group's range that are cut off below ...
    const float* steps;  // ... and the steps between codes, in ranges
    int64_t outputs, inputs, stride;
    int32_t type;  // 0 float32, 1 float16, 2 bfloat16
    int32_t clips, fits;
    int32_t in_strips;
    int32_t threads;
};

// A matrix in strips, and what is done with it: a product, its values in panels, or some of its rows.
struct Strips {
    const uint8_t* strips;
    const void* x;     // product: [rows, inputs] of the type. Rows: [rows] int64, which ones
    const void* bias;  // product: [outputs], or null
    void* passing;     // product: [rows, packed_row_bytes()], written
    void* output;      // product: [rows, outputs]. Panels: [panels, padded inputs / v, 64, v] of the type, v of
                       // 4 bytes. Rows: [rows, inputs] of the type
    int64_t outputs, inputs, rows;
    int64_t first_output, end_output;  // panels: whole ones, but for the matrix' last outputs
    int32_t type;  // 0 float32, 1 float16, 2 bfloat16
    int32_t threads;
    int32_t path;  // 0 portable, 1 AVX-512, 2 AVX-512 with BF16
};
}
