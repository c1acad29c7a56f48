// What the kernel's parts share: arguments of a call, and what each instruction set offers.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum DType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Forward {
    DType dtype;
    int64_t num_sources, tokens, width;
    const void* const* sources;
    const int64_t* strides;  // elements from one token's row to the next, per source
    const float *u, *norm_weight;
    void* out;
    float *alpha, *saved, *norms;  // norms: L2 norm of h per token; each null where it is not wanted
    float eps, scale, norm_eps, gain;
};

struct Backward {
    DType dtype;
    int64_t num_sources, tokens, width;
    const void* const* sources;
    const int64_t* strides;
    const float *u, *norm_weight;
    const void* d_out;
    const float *d_alpha, *alpha, *saved;
    void* const* d_sources;  // null where no gradient is wanted
    float scale, gain;
};

// norms: L2 norm of after - before per token
struct Difference {
    DType dtype;
    int64_t tokens, width;
    const void *after, *before;
    float* norms;
};

static inline int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }

// Sources whose rows share a 2 MiB second-level cache with room to spare.
static inline int64_t group_size(int64_t width, size_t bytes) {
    int64_t rows = (int64_t)(512 * 1024) / (int64_t)(width * bytes);
    return rows < 4 ? 4 : rows;
}

// How many rows on to prefetch: far enough to hide the memory, near enough that they stay in the cache.
static inline int64_t rows_ahead(int64_t num_sources, int64_t width, size_t bytes) {
    int64_t rows = (int64_t)(64 * 1024) / (int64_t)(width * bytes);
    return rows < 1 ? 1 : rows < num_sources ? rows : num_sources;
}

[[maybe_unused]] static inline float bfloat_to_float(uint16_t bfloat) {
    uint32_t bits = (uint32_t)bfloat << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

[[maybe_unused]] static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float x;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else {  // the exponent is rebased by a multiplication, which also handles subnormal numbers
        bits = rest << 13;
        memcpy(&x, &bits, 4);
        x *= 0x1p112f;
        memcpy(&bits, &x, 4);
        bits |= sign;
    }
    memcpy(&x, &bits, 4);
    return x;
}

[[maybe_unused]] static inline uint16_t float_to_half(float x) {  // round to nearest even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: adding 0.5 puts the result into the low bits, rounded
        float magnitude;
        memcpy(&magnitude, &rest, 4);
        magnitude += 0.5f;
        memcpy(&rest, &magnitude, 4);
        return (uint16_t)(sign | (rest - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - 0x38000000) >> 13);
}

// Tokens [begin, end) of a call; scratch holds scratch_floats(...) floats. du and dn are added to.
struct Kernels {
    void (*forward)(const Forward&, int64_t begin, int64_t end, float* scratch);
    void (*backward)(const Backward&, int64_t begin, int64_t end, float* scratch, double* du, double* dn);
    void (*difference_norms)(const Difference&, int64_t begin, int64_t end);
};

static inline int64_t scratch_floats(int64_t num_sources, int64_t width) {
    return 4 * padded(width) + 8 * num_sources + 32;
}

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif
