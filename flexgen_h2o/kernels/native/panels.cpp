// Products of few rows with matrices in panels of 64 outputs, in bfloat16, where the processor has dot products of
// pairs (AVX-512 BF16).
//
// A matrix is one stream of memory: panel by panel, step by step of two inputs, 64 pairs. A part of it that fits the
// second cache is multiplied with all rows, some at a time, while the next part is asked for: with few rows the memory
// is what limits, with many the arithmetic, and in between neither waits for the other.
//
// A plain C interface, as that of attention.cpp.

#include "vectors.h"

extern "C" {

struct Panels {
    const void* weights;  // [panels, depth, 64, 2] bfloat16, depth at least inputs / 2
    const void* x;        // [rows, inputs] bfloat16
    const void* bias;     // [outputs] bfloat16, or null
    void* output;         // [rows, outputs] bfloat16
    int64_t outputs, inputs, depth, rows;
    int32_t threads;
};

int32_t flexgen_h2o_strips_path();  // quantised.cpp; 2 stands for AVX-512 BF16
}

namespace {
constexpr int PANEL = 64;   // outputs
constexpr int VECTORS = 4;  // that hold a step of a panel
constexpr int STEP = 2 * PANEL;  // values of a step
constexpr int64_t LINE = 64;     // bytes
// Steps of a part: 128 KB of weights.
constexpr int64_t PART = 512;
// Rows at once: there are registers for their 24 sums, a step of weights and a pair of x.
constexpr int MOST_AT_ONCE = 6;
constexpr int64_t MOST_ROWS = 128;  // with more, sums of a panel leave the first cache
}  // namespace

#ifdef HAS_X86_VECTORS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prefer-vector-width=512")
#endif
namespace panels_bf16 {

// What a pass asks for while it computes: `lines` cache lines at every step, `stride` bytes further on each time.
struct Ahead {
    const char* start;
    int64_t stride;
    int lines;
};

// Adds the products of ROWS rows with a part of a panel to their sums, [ROWS, 64].
template <int ROWS>
void add_products(const BFloat16* weights, const BFloat16* x, int64_t inputs, int64_t steps, Ahead ahead, float* sums) {
    __m512 parts[ROWS][VECTORS];
    for (int row = 0; row < ROWS; ++row) {
        for (int i = 0; i < VECTORS; ++i) parts[row][i] = _mm512_loadu_ps(sums + row * PANEL + 16 * i);
    }
    for (int64_t step = 0; step < steps; ++step) {
        __m512bh values[VECTORS];
        for (int i = 0; i < VECTORS; ++i) values[i] = (__m512bh)_mm512_loadu_si512(weights + step * STEP + 32 * i);
        for (int line = 0; line < ahead.lines; ++line) _mm_prefetch(ahead.start + line * LINE, _MM_HINT_T1);
        ahead.start += ahead.stride;
        for (int row = 0; row < ROWS; ++row) {
            int32_t pair;
            std::memcpy(&pair, x + row * inputs + 2 * step, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int i = 0; i < VECTORS; ++i) parts[row][i] = _mm512_dpbf16_ps(parts[row][i], values[i], both);
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int i = 0; i < VECTORS; ++i) _mm512_storeu_ps(sums + row * PANEL + 16 * i, parts[row][i]);
    }
}

using AddProducts = void (*)(const BFloat16*, const BFloat16*, int64_t, int64_t, Ahead, float*);
constexpr AddProducts ADD_PRODUCTS[] = {nullptr, add_products<1>, add_products<2>, add_products<3>, add_products<4>, add_products<5>, add_products<6>};

// Sums of some rows and a panel, with the bias, to where they belong.
inline void finish(const Panels& task, int64_t panel, const float* sums) {
    const BFloat16* const biases = static_cast<const BFloat16*>(task.bias);
    for (int i = 0; i < VECTORS; ++i) {
        const int64_t first = panel * PANEL + 16 * i, left = task.outputs - first;
        if (left <= 0) return;
        const __mmask16 mask = left >= 16 ? 0xffff : __mmask16((1u << left) - 1);
        __m512 bias = _mm512_setzero_ps();
        if (biases) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, biases + first));
            bias = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        }
        for (int64_t row = 0; row < task.rows; ++row) {
            const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + row * PANEL + 16 * i), bias);
            BFloat16* const target = static_cast<BFloat16*>(task.output) + row * task.outputs + first;
            _mm256_mask_storeu_epi16(target, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

inline void multiply_panel(const Panels& task, int64_t panel) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    std::memset(sums, 0, task.rows * PANEL * sizeof(float));
    const BFloat16* const weights = static_cast<const BFloat16*>(task.weights) + panel * task.depth * STEP;
    const BFloat16* const x = static_cast<const BFloat16*>(task.x);
    const int64_t passes = (task.rows + MOST_AT_ONCE - 1) / MOST_AT_ONCE, all_steps = task.inputs / 2;
    for (int64_t first = 0; first < all_steps; first += PART) {
        const int64_t steps = all_steps - first < PART ? all_steps - first : PART;
        const BFloat16* const part = weights + first * STEP;
        const char* next = reinterpret_cast<const char*>(part + PART * STEP);
        const int64_t stride = STEP * sizeof(BFloat16) / passes;
        for (int64_t pass = 0; pass < passes; ++pass) {
            const int64_t row = pass * task.rows / passes, rows = (pass + 1) * task.rows / passes - row;
            const Ahead ahead{next + pass * steps * stride, stride, int((stride + LINE - 1) / LINE)};
            ADD_PRODUCTS[rows](part, x + row * task.inputs + 2 * first, task.inputs, steps, ahead, sums + row * PANEL);
        }
    }
    finish(task, panel, sums);
}

}  // namespace panels_bf16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

extern "C" {

// Size of the structure, so that a library of another version is not taken for this one.
int64_t flexgen_h2o_panels_size() { return int64_t(sizeof(Panels)); }

// The most rows of a product; 0 where the processor has none.
int64_t flexgen_h2o_panel_rows() { return flexgen_h2o_strips_path() == 2 ? MOST_ROWS : 0; }

// x . matrix^T + bias, of an even number of inputs.
void flexgen_h2o_multiply_panels(const Panels* task) {
#ifdef HAS_X86_VECTORS
    const int64_t panels = (task->outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(task->threads)
    for (int64_t panel = 0; panel < panels; ++panel) panels_bf16::multiply_panel(*task, panel);
#endif
}
}
