// What the functions of attention.cpp take, and how entries lie in memory.

#pragma once

#include <cstdint>

#include "vectors.h"

extern "C" {

// How an element of a key or value is kept, by number.
//
// ENTRY_4_BIT: an entry of head_dim elements is (head_dim + 1) / 2 bytes of codes, element 2i in the lower half of byte i,
// element 2i + 1 in the upper one; then for every 64 elements, the last of which may be fewer, scale and minimum in
// bfloat16. An element is minimum + scale * code.
enum : int32_t { FLOAT32, FLOAT16, BFLOAT16, ENTRY_4_BIT };

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
    int32_t heavy_type, ring_type;  // the same, or the heavy region in 4 bits
    int32_t query_type;             // of the output too; float32, or that of a ring which is not in 4 bits
    int32_t accumulates;            // whether scores take up the weights
    float decay;
    int32_t threads;
    int32_t path;  // 0 portable, 1 AVX2, 2 AVX-512, 3 AVX-512 with BF16
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
    const float* initial_scores;  // [pairs]
    int64_t pairs, head_dim, heavy_slots, ring_slots, ring_slot;
    int32_t heavy_type, ring_type, token_type;
    int32_t column;
    int32_t ring_is_full;
    int32_t threads;
    int32_t path;
};
}

namespace {

struct FourBits {};  // as a type of entries

constexpr int64_t GROUP = 64;  // elements that share a scale and a minimum
constexpr int64_t RANGE_BYTES = 4;
constexpr float LEVELS = 15.0f;

inline int64_t groups_of(int64_t head_dim) { return (head_dim + GROUP - 1) / GROUP; }
inline int64_t code_bytes(int64_t head_dim) { return (head_dim + 1) / 2; }

inline int64_t entry_bytes(int32_t type, int64_t head_dim) {
    if (type == ENTRY_4_BIT) return code_bytes(head_dim) + RANGE_BYTES * groups_of(head_dim);
    return head_dim * (type == FLOAT32 ? 4 : 2);
}

// How far ahead of what is being read memory is asked for, in bytes: enough for the time that memory takes, and a small
// part of the first-level cache.
constexpr int64_t AHEAD = 8192;

// Where memory is to be asked for while `nbytes` from `start` on are read: `AHEAD` bytes on in them, or as far into what
// comes after them, at `next`.
class Lookahead {
  public:
    Lookahead(const char* start, int64_t nbytes, const char* next)
        : turn_(start + (nbytes > AHEAD ? nbytes - AHEAD : 0)), jump_(next - turn_) {}
    const char* from(const char* entry) const { return entry + (entry < turn_ ? AHEAD : jump_); }

  private:
    const char* turn_;
    int64_t jump_;
};

// The keys, or the values, of one region for some consecutive pairs, which are read pair by pair.
struct Part {
    const char* start;
    int64_t entry;  // bytes
    int64_t slots, live;
    int64_t pairs;
    const char* next = nullptr;  // what is read after it

    const char* of(int64_t pair) const { return start + pair * slots * entry; }
    // Where no slot is empty, the pairs' entries are one stretch.
    Lookahead lookahead(int64_t pair) const {
        if (live == slots) return Lookahead(start, pairs * slots * entry, next);
        return Lookahead(of(pair), live * entry, pair + 1 < pairs ? of(pair + 1) : next);
    }
};

// A thread's memory for the pairs that it takes together, in floats.
class Scratch {
  public:
    explicit Scratch(const Attention& unit)
        : in_4_bits_(unit.heavy_type == ENTRY_4_BIT || unit.ring_type == ENTRY_4_BIT),
          logits_(whole(unit.heavy_len + unit.ring_len) + LANES),
          groups_(groups_of(unit.head_dim)),
          elements_(in_4_bits_ ? groups_ * GROUP : whole(unit.head_dim)),
          floats_(logits_ + 2 * elements_ + LANES) {
        if (in_4_bits_) floats_ += 2 * elements_ + groups_ * (WORDS / 2 + LANES) + whole(groups_);
    }

    static constexpr int64_t LANES = 16;  // floats of the widest vector
    int64_t floats_of_a_pair() const { return floats_; }
    void take(float* memory) { memory_ = memory; }

    int64_t groups() const { return groups_; }
    int64_t elements() const { return elements_; }  // of a query and an output, some of which may not be used
    // Logits, then weights of the live entries, heavy first; behind them a vector that may be written.
    float* logits(int64_t pair) const { return memory_ + pair * floats_; }
    float* query(int64_t pair) const { return logits(pair) + logits_; }
    float* output(int64_t pair) const { return query(pair) + elements_; }
    float* scale(int64_t pair) const { return output(pair) + elements_; }
    // For entries in 4 bits: query and output in the order in which codes become vectors, the sums of the query's
    // groups, what the minimums add to a group of the output, and the query in bfloat16.
    float* split_query(int64_t pair) const { return scale(pair) + LANES; }
    float* split_output(int64_t pair) const { return split_query(pair) + elements_; }
    float* query_sums(int64_t pair) const { return split_output(pair) + elements_; }
    float* minimums(int64_t pair) const { return query_sums(pair) + whole(groups_); }
    uint16_t* words(int64_t pair) const { return reinterpret_cast<uint16_t*>(minimums(pair) + groups_ * LANES); }

    static constexpr int64_t WORDS = 3 * GROUP;  // of a group of the query, in up to three parts

  private:
    static int64_t whole(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

    bool in_4_bits_;
    int64_t logits_, groups_, elements_, floats_;
    float* memory_ = nullptr;
};

}  // namespace
