// Matrices in 4-bit groups (quantised.h): quantising them, restoring their values, and products of few rows that read
// the codes themselves.
//
// A plain C interface, as that of attention.cpp.

#include "quantised.h"

// A product and a sum are two roundings here, as in torch: what is quantised does not depend on the compiler.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace {
// How far ahead of what is being read memory is asked for, in bytes.
constexpr int64_t AHEAD = 4096;
// Rows and strips that a product takes at once: there are registers for their 20 sums and all that is added to them.
constexpr int MOST_ROWS = 5;
constexpr int64_t STRIPS_AT_ONCE = 4;

// Steps of 4 bytes of a row of x as the product reads it, and bytes that the row takes then.
inline int64_t steps_of(int64_t inputs, int32_t type) { return divided_up(inputs, BLOCK) * BLOCK / (type == 0 ? 1 : 2); }
inline int64_t packed_row_bytes(int64_t inputs, int32_t type) { return 4 * (steps_of(inputs, type) + groups_of(inputs)); }

// Some rows of x as the product reads them: in steps of 4 bytes, padded with zeros to whole blocks, the rows side by
// side; and their sums over each group.
struct Part {
    int64_t first, rows;
    uint32_t* values;  // [steps, rows]
    float* sums;       // [groups, rows]
};
}  // namespace

namespace quantised_portable {
#include "quantised.inc"
}

#ifdef HAS_X86_VECTORS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
#endif
namespace quantised_avx512 {
#include "quantised.inc"
#include "quantised_avx512.inc"
#include "quantised_products.inc"
}  // namespace quantised_avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prefer-vector-width=512")
#endif
namespace quantised_bf16 {
#include "quantised_bf16.inc"
#include "quantised_products.inc"
}  // namespace quantised_bf16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

extern "C" {

// The best path that this processor has: 0 portable, 1 AVX-512, 2 AVX-512 with BF16.
int32_t flexgen_h2o_strips_path() {
#ifdef HAS_X86_VECTORS
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
#endif
    return 0;
}
}

namespace {

using Quantise = void (*)(const Quantisation&, int64_t);

template <class T>
Quantise choose_quantise() {
#ifdef HAS_X86_VECTORS
    if (flexgen_h2o_strips_path() > 0) return quantised_avx512::quantise_strip<T>;
#endif
    return quantised_portable::quantise_strip<T>;
}

// Restores a group of a panel's inputs, up to where the panel is padded: zeros there, and for outputs that are not.
template <class T>
void restore_in_panel(const Strips& matrix, int64_t panel, int64_t group) {
    constexpr int TOGETHER = 4 / sizeof(T);
    const int64_t padded = divided_up(matrix.inputs, DEPTH * TOGETHER) * DEPTH * TOGETHER;
    const int64_t n = least(GROUP, matrix.inputs - group * GROUP);
    const int64_t filled = least(GROUP, padded - group * GROUP);
    const int64_t first_strip = matrix.first_output / STRIP + panel * (PANEL / STRIP);
    const int64_t strips = least(PANEL / STRIP, divided_up(matrix.end_output, STRIP) - first_strip);
    T* const target = static_cast<T*>(matrix.output) + (panel * padded + group * GROUP) * PANEL;
    if (strips < PANEL / STRIP) std::memset(target, 0, filled * PANEL * sizeof(T));
    for (int64_t strip = 0; strip < strips; ++strip) {
        const uint8_t* const source = matrix.strips + (first_strip + strip) * strip_bytes(matrix.inputs) + group_start(group);
        T* const quarter = target + strip * STRIP * TOGETHER;
#ifdef HAS_X86_VECTORS
        if constexpr (sizeof(T) == 2) {
            if (matrix.path == 2 && n == GROUP) {
                quantised_bf16::restore_whole_group(source, quarter);
                continue;
            }
        }
        if (matrix.path > 0) quantised_avx512::restore_group(source, n, quarter);
        else
#endif
            quantised_portable::restore_group(source, n, quarter);
    }
    for (int64_t i = n; i < filled; ++i) {
        for (int output = 0; output < PANEL; ++output) {
            target[i / TOGETHER * TOGETHER * PANEL + output * TOGETHER + i % TOGETHER] = T{};
        }
    }
}

template <class T>
void restore_panels(const Strips& matrix) {
    const int64_t panels = divided_up(matrix.end_output - matrix.first_output, PANEL), groups = groups_of(matrix.inputs);
#pragma omp parallel for schedule(static) num_threads(matrix.threads)
    for (int64_t part = 0; part < panels * groups; ++part) restore_in_panel<T>(matrix, part / groups, part % groups);
}

template <class T>
void restore_rows(const Strips& matrix) {
    const int64_t* const wanted = static_cast<const int64_t*>(matrix.x);
#pragma omp parallel for schedule(static) num_threads(matrix.threads)
    for (int64_t row = 0; row < matrix.rows; ++row) {
        quantised_portable::restore_row(matrix, wanted[row], static_cast<T*>(matrix.output) + row * matrix.inputs);
    }
}

Part part_of(const Strips& matrix, int64_t part, int64_t parts) {
    const int64_t first = part * matrix.rows / parts, rows = (part + 1) * matrix.rows / parts - first;
    char* const start = static_cast<char*>(matrix.passing) + first * packed_row_bytes(matrix.inputs, matrix.type);
    uint32_t* const values = reinterpret_cast<uint32_t*>(start);
    return {first, rows, values, reinterpret_cast<float*>(values + rows * steps_of(matrix.inputs, matrix.type))};
}

}  // namespace

extern "C" {

// Sizes of the two structures, so that a library of another version is not taken for this one.
int64_t flexgen_h2o_quantised_sizes() { return int64_t(sizeof(Quantisation)) << 32 | int64_t(sizeof(Strips)); }

int64_t flexgen_h2o_strip_bytes(int64_t inputs) { return strip_bytes(inputs); }

int64_t flexgen_h2o_packed_row_bytes(int64_t inputs, int32_t type) { return packed_row_bytes(inputs, type); }

void flexgen_h2o_quantise(const Quantisation* task) {
    const Quantise quantise = task->type == 0   ? choose_quantise<float>()
                              : task->type == 1 ? choose_quantise<Half>()
                                                : choose_quantise<BFloat16>();
#pragma omp parallel for schedule(static) num_threads(task->threads)
    for (int64_t strip = 0; strip < divided_up(task->outputs, STRIP); ++strip) quantise(*task, strip);
}

void flexgen_h2o_restore_panels(const Strips* matrix) {
    matrix->type == 0 ? restore_panels<float>(*matrix) : restore_panels<BFloat16>(*matrix);
}

void flexgen_h2o_restore_rows(const Strips* matrix) {
    if (matrix->type == 0) return restore_rows<float>(*matrix);
    matrix->type == 1 ? restore_rows<Half>(*matrix) : restore_rows<BFloat16>(*matrix);
}

// x . matrix^T + bias, in float32 from path 1 on, in bfloat16 from path 2 on.
void flexgen_h2o_multiply_strips(const Strips* matrix) {
#ifdef HAS_X86_VECTORS
    const auto pack = matrix->type == 0 ? quantised_avx512::pack : quantised_bf16::pack;
    const auto multiply = matrix->type == 0 ? quantised_avx512::multiply_strips : quantised_bf16::multiply_strips;
    const int64_t parts = divided_up(matrix->rows, MOST_ROWS), strips = divided_up(matrix->outputs, STRIP);
#pragma omp parallel num_threads(matrix->threads)
    {
#pragma omp for schedule(static)
        for (int64_t number = 0; number < parts; ++number) pack(*matrix, part_of(*matrix, number, parts));
#pragma omp for schedule(static)
        for (int64_t first = 0; first < strips; first += STRIPS_AT_ONCE) {
            for (int64_t number = 0; number < parts; ++number) multiply(*matrix, first, part_of(*matrix, number, parts));
        }
    }
#endif
}
}
