// Decode attention over a KV buffer of two regions (Zhang et al. 2023, arXiv 2306.14048, section 4), in one pass: every
// key and value is read once, in its own precision; logits, softmax, sum of values, scores and the choice of the entry
// that would be evicted next stay in registers and caches.
//
// A plain C interface, so that no version of torch or Python matters. OpenMP's functions are those of the process that
// loads this: torch's, so that there is one pool of threads.

#include "attention.h"

#include <initializer_list>
#include <type_traits>
#include <vector>

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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#endif
#define CODES_IN_BFLOAT16
namespace avx512_bf16 {
#include "vectors_avx512.inc"
#include "attention.inc"
}  // namespace avx512_bf16
#undef CODES_IN_BFLOAT16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

using Attend = void (*)(const Attention&, int64_t, int64_t, const Scratch&);
using Read = float (*)(const Attention&, int64_t, int64_t);
using Quantise = void (*)(char*, const char*, int32_t, int64_t);

template <class Heavy, class Ring>
Attend choose_path(int32_t path) {
#ifdef HAS_X86_VECTORS
    if constexpr (std::is_same<Heavy, FourBits>::value) {
        if (path == 3) return avx512_bf16::attend<Heavy, Ring>;
    }
    if (path >= 2) return avx512::attend<Heavy, Ring>;
    if (path == 1) return avx2::attend<Heavy, Ring>;
#endif
    return portable::attend<Heavy, Ring>;
}

template <class Ring>
Attend choose_heavy(const Attention& unit) {
    if (unit.heavy_type == ENTRY_4_BIT) return choose_path<FourBits, Ring>(unit.path);
    return choose_path<Ring, Ring>(unit.path);
}

Attend choose(const Attention& unit) {
    switch (unit.ring_type) {
        case FLOAT32: return choose_heavy<float>(unit);
        case FLOAT16: return choose_heavy<Half>(unit);
        case BFLOAT16: return choose_heavy<BFloat16>(unit);
        default: return choose_heavy<FourBits>(unit);
    }
}

Read choose_read(int32_t path) {
#ifdef HAS_X86_VECTORS
    if (path >= 2) return avx512::read_only;
    if (path == 1) return avx2::read_only;
#endif
    return portable::read_only;
}

Quantise choose_quantise(int32_t path) {
#ifdef HAS_X86_VECTORS
    if (path >= 2) return avx512::quantise;
    if (path == 1) return avx2::quantise;
#endif
    return portable::quantise;
}

// How many pairs a thread takes together: so many that their keys are long stretches, few enough that all threads have
// work and that what is kept for them stays in the caches.
int64_t pairs_together(const Attention& unit) {
    constexpr int64_t KEY_BYTES = 1 << 20, MOST = 64, SHARES = 4;
    const int64_t bytes = unit.heavy_len * entry_bytes(unit.heavy_type, unit.head_dim) +
                          unit.ring_len * entry_bytes(unit.ring_type, unit.head_dim);
    const int64_t wanted = KEY_BYTES / (bytes ? bytes : 1), share = unit.pairs / (SHARES * int64_t(unit.threads));
    const int64_t most = wanted < MOST ? wanted : MOST, count = share < most ? share : most;
    return count > 1 ? count : 1;
}

// A thread's scratch; kept from call to call.
Scratch take_scratch(const Attention& unit, int64_t pairs) {
    thread_local std::vector<float> memory;
    Scratch scratch(unit);
    const size_t floats = pairs * scratch.floats_of_a_pair() + Scratch::LANES;
    if (memory.size() < floats) memory.resize(floats);
    scratch.take(memory.data() + -reinterpret_cast<intptr_t>(memory.data()) % 64 / int64_t(sizeof(float)) + Scratch::LANES);
    return scratch;
}

}  // namespace

extern "C" {

// Sizes of the two structures, so that a library of another version is not taken for this one.
int64_t flexgen_h2o_sizes() { return int64_t(sizeof(Attention)) << 32 | int64_t(sizeof(Entry)); }

// The best path that this processor has for a head_dim: every vector must be filled by elements of one entry. The last
// one differs from the one before for entries in 4 bits alone.
int32_t flexgen_h2o_best_path(int64_t head_dim, int32_t in_4_bits) {
#ifdef HAS_X86_VECTORS
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && head_dim % 16 == 0) return in_4_bits && __builtin_cpu_supports("avx512bf16") ? 3 : 2;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2 && head_dim % 8 == 0) return 1;
#endif
    return 0;
}

void flexgen_h2o_decode_attention(const Attention* unit) {
    const Attend attend = choose(*unit);
    const int64_t together = pairs_together(*unit), groups = (unit->pairs + together - 1) / together;
#pragma omp parallel for schedule(static) num_threads(unit->threads)
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * together, left = unit->pairs - first;
        attend(*unit, first, left < together ? left : together, take_scratch(*unit, together));
    }
}

float flexgen_h2o_read_only(const Attention* unit) {
    const Read read = choose_read(unit->path);
    const int64_t together = pairs_together(*unit), groups = (unit->pairs + together - 1) / together;
    float largest = 0;
#pragma omp parallel for schedule(static) num_threads(unit->threads) reduction(max : largest)
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * together, left = unit->pairs - first;
        const float found = read(*unit, first, left < together ? left : together);
        largest = found > largest ? found : largest;
    }
    return largest;
}

// The oldest entry leaves the ring, if it is full: it replaces the lowest-scored heavy entry if its own score is
// strictly greater, else it is dropped. The new token overwrites its slot.
void flexgen_h2o_enter(const Entry* unit) {
    const int64_t slots = unit->heavy_slots + unit->ring_slots, head_dim = unit->head_dim;
    const int64_t heavy_bytes = entry_bytes(unit->heavy_type, head_dim), ring_bytes = entry_bytes(unit->ring_type, head_dim);
    const int64_t token_bytes = entry_bytes(unit->token_type, head_dim);
    const Quantise quantise = choose_quantise(unit->path);
    // An entry of one type as a region keeps its own: as it is, or quantised.
    const auto store_entry = [&](char* target, int32_t target_type, const char* source, int32_t type, int64_t bytes) {
        if (target_type == type) std::memcpy(target, source, bytes);
        else quantise(target, source, type, head_dim);
    };
#pragma omp parallel for schedule(static) num_threads(unit->threads)
    for (int64_t pair = 0; pair < unit->pairs; ++pair) {
        float* const scores = unit->scores + pair * slots;
        int32_t* const columns = unit->columns + pair * slots;
        const int64_t in_ring = (pair * unit->ring_slots + unit->ring_slot) * ring_bytes;
        char* const ring_key = static_cast<char*>(unit->ring_keys) + in_ring;
        char* const ring_value = static_cast<char*>(unit->ring_values) + in_ring;
        const int64_t ring_slot = unit->heavy_slots + unit->ring_slot;
        if (unit->ring_is_full && unit->heavy_slots) {
            const int64_t loser = unit->losers[pair];
            if (scores[ring_slot] > scores[loser]) {
                const int64_t at = (pair * unit->heavy_slots + loser) * heavy_bytes;
                store_entry(static_cast<char*>(unit->heavy_keys) + at, unit->heavy_type, ring_key, unit->ring_type, heavy_bytes);
                store_entry(static_cast<char*>(unit->heavy_values) + at, unit->heavy_type, ring_value, unit->ring_type, heavy_bytes);
                scores[loser] = scores[ring_slot];
                columns[loser] = columns[ring_slot];
            }
        }
        const char* const key = static_cast<const char*>(unit->keys) + pair * token_bytes;
        const char* const value = static_cast<const char*>(unit->values) + pair * token_bytes;
        store_entry(ring_key, unit->ring_type, key, unit->token_type, ring_bytes);
        store_entry(ring_value, unit->ring_type, value, unit->token_type, ring_bytes);
        const float score = unit->initial_scores[pair];
        scores[ring_slot] = score;
        columns[ring_slot] = score == -std::numeric_limits<float>::infinity() ? -1 : unit->column;
    }
}
}
