// Decode attention over a KV buffer of two regions (Zhang et al. 2023, arXiv 2306.14048, section 4), in one pass: every
// key and value is read once, in its own precision; logits, softmax, sum of values, scores and the choice of the entry
// that would be evicted next stay in registers and the first-level cache.
//
// A plain C interface, so that no version of torch or Python matters. OpenMP's functions are those of the process that
// loads this: torch's, so that there is one pool of threads.

#include <vector>

#include "vectors.h"

extern "C" {

// One unit's KV and what attention does to it. Every pair of row and head has `heavy_slots` and `ring_slots` entries of
// `head_dim` elements in each of keys and values, and as many scores, heavy first; `*_len` of them are read.
struct Attention {
    const void* query;  // [pairs, head_dim], already scaled
    const void* heavy_keys;
    const void* heavy_values;
    const void* ring_keys;
    const void* ring_values;
    float* scores;    // [pairs, heavy_slots + ring_slots]; -infinity marks an empty slot
    int32_t* losers;  // [pairs], written: the heavy slot with the lowest score
    void* output;     // [pairs, head_dim], written
    int64_t pairs, head_dim, heavy_slots, ring_slots, heavy_len, ring_len;
    int32_t kv_type, query_type;  // 0 float32, 1 float16, 2 bfloat16
    int32_t accumulates;          // whether scores take up the weights
    float decay;
    int32_t threads;
    int32_t path;  // 0 portable, 1 AVX2, 2 AVX-512
};

// A new token of one unit.
struct Entry {
    void* heavy_keys;
    void* heavy_values;
    void* ring_keys;
    void* ring_values;
    float* scores;
    int32_t* columns;  // [pairs, heavy_slots + ring_slots]
    const int32_t* losers;
    const void* keys;  // [pairs, head_dim]
    const void* values;
    const float* initial_scores;  // [rows]
    int64_t pairs, heads, entry_bytes, heavy_slots, ring_slots, ring_slot;
    int32_t column;
    int32_t ring_is_full;
    int32_t threads;
};
}

namespace {

// How far ahead of what is being read memory is asked for, in bytes: enough for the time that memory takes, and a small
// part of the first-level cache.
#ifndef AHEAD
constexpr int64_t AHEAD = 8192;
#endif

// How many vectors of an entry are taken at once: as many as there are registers for.
constexpr int MOST_BLOCKS = 8;

// Consecutive live entries of one pair: where they begin, how many bytes, and what will be read after them.
struct Stretch {
    const char* start;
    int64_t nbytes;
    const char* next;
};

// Where memory is to be asked for while a stretch is read: `AHEAD` bytes on in it, or as far into what comes after it.
class Lookahead {
  public:
    explicit Lookahead(const Stretch& stretch)
        : turn_(stretch.start + stretch.nbytes - AHEAD), jump_(stretch.next - stretch.start - stretch.nbytes + AHEAD) {}
    const char* from(const char* entry) const { return entry + (entry < turn_ ? AHEAD : jump_); }

  private:
    const char* turn_;
    int64_t jump_;
};

template <class T>
Stretch stretch_of(const void* region, int64_t pair, int64_t slots, int64_t live, int64_t head_dim) {
    const int64_t entry = head_dim * int64_t(sizeof(T));
    return {static_cast<const char*>(region) + pair * slots * entry, live * entry, nullptr};
}

}  // namespace

namespace portable {
#include "attention.inc"
}

#ifdef HAS_X86_VECTORS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include "vectors_avx2.inc"
#include "attention.inc"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
namespace avx512 {
#include "vectors_avx512.inc"
#include "attention.inc"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

using Attend = void (*)(const Attention&, int64_t, float*);
using Read = float (*)(const Attention&, int64_t);

template <class T, class Q>
Attend choose_path(int32_t path) {
#ifdef HAS_X86_VECTORS
    if (path == 2) return avx512::attend<T, Q>;
    if (path == 1) return avx2::attend<T, Q>;
#endif
    return portable::attend<T, Q>;
}

template <class T>
Attend choose_query(const Attention& unit) {
    if (unit.query_type == 0) return choose_path<T, float>(unit.path);
    return choose_path<T, T>(unit.path);
}

Attend choose(const Attention& unit) {
    if (unit.kv_type == 1) return choose_query<Half>(unit);
    if (unit.kv_type == 2) return choose_query<BFloat16>(unit);
    return choose_query<float>(unit);
}

template <class T>
Read choose_read(int32_t path) {
#ifdef HAS_X86_VECTORS
    if (path == 2) return avx512::read_only<T>;
    if (path == 1) return avx2::read_only<T>;
#endif
    return portable::read_only<T>;
}

// A thread's logits, query and output; kept from call to call.
float* scratch(int64_t floats) {
    thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < floats) memory.resize(floats);
    return memory.data();
}

}  // namespace

extern "C" {

// Sizes of the two structures, so that a library of another version is not taken for this one.
int64_t flexgen_h2o_sizes() { return int64_t(sizeof(Attention)) << 32 | int64_t(sizeof(Entry)); }

// The best path that this processor has for a head_dim: every vector must be filled by elements of one entry.
int32_t flexgen_h2o_best_path(int64_t head_dim) {
#ifdef HAS_X86_VECTORS
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && head_dim % 16 == 0) return 2;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2 && head_dim % 8 == 0) return 1;
#endif
    return 0;
}

void flexgen_h2o_decode_attention(const Attention* unit) {
    const Attend attend = choose(*unit);
    const int64_t floats = unit->heavy_len + unit->ring_len + 2 * unit->head_dim;
#pragma omp parallel for schedule(static) num_threads(unit->threads)
    for (int64_t pair = 0; pair < unit->pairs; ++pair) attend(*unit, pair, scratch(floats));
}

float flexgen_h2o_read_only(const Attention* unit) {
    const Read read = unit->kv_type == 0 ? choose_read<float>(unit->path) : choose_read<Half>(unit->path);
    float largest = 0;
#pragma omp parallel for schedule(static) num_threads(unit->threads) reduction(max : largest)
    for (int64_t pair = 0; pair < unit->pairs; ++pair) {
        const float found = read(*unit, pair);
        largest = found > largest ? found : largest;
    }
    return largest;
}

// The oldest entry leaves the ring, if it is full: it replaces the lowest-scored heavy entry if its own score is
// strictly greater, else it is dropped. The new token overwrites its slot.
void flexgen_h2o_enter(const Entry* unit) {
    const int64_t slots = unit->heavy_slots + unit->ring_slots;
#pragma omp parallel for schedule(static) num_threads(unit->threads)
    for (int64_t pair = 0; pair < unit->pairs; ++pair) {
        const int64_t bytes = unit->entry_bytes;
        float* const scores = unit->scores + pair * slots;
        int32_t* const columns = unit->columns + pair * slots;
        char* const ring_key = static_cast<char*>(unit->ring_keys) + (pair * unit->ring_slots + unit->ring_slot) * bytes;
        char* const ring_value = static_cast<char*>(unit->ring_values) + (pair * unit->ring_slots + unit->ring_slot) * bytes;
        const int64_t ring_slot = unit->heavy_slots + unit->ring_slot;
        if (unit->ring_is_full && unit->heavy_slots) {
            const int64_t loser = unit->losers[pair];
            if (scores[ring_slot] > scores[loser]) {
                const int64_t at = (pair * unit->heavy_slots + loser) * bytes;
                std::memcpy(static_cast<char*>(unit->heavy_keys) + at, ring_key, bytes);
                std::memcpy(static_cast<char*>(unit->heavy_values) + at, ring_value, bytes);
                scores[loser] = scores[ring_slot];
                columns[loser] = columns[ring_slot];
            }
        }
        std::memcpy(ring_key, static_cast<const char*>(unit->keys) + pair * bytes, bytes);
        std::memcpy(ring_value, static_cast<const char*>(unit->values) + pair * bytes, bytes);
        const float score = unit->initial_scores[pair / unit->heads];
        scores[ring_slot] = score;
        columns[ring_slot] = score == -std::numeric_limits<float>::infinity() ? -1 : unit->column;
    }
}
}
