// Depth attention for one instruction set: included once per set, inside its own namespace, with WIDTH the
// number of float lanes. Vectors are the compiler's (GCC and Clang), so that one source serves AVX-512, AVX2,
// NEON and the baseline. Everything is computed in float32; rows are converted as they are loaded.
//
// Forward, per token: every source row is read from memory once. Sources are taken in groups that stay in the
// cache; inside a group the scores come first (mean square and dot product in one sweep), then the mixture.
// Groups are joined by the running maximum of the softmax. The next token's rows are prefetched meanwhile.
//
// Backward, per token: the rows again come from memory once; the dot products with dh are taken in a first
// sweep, and one more sweep over the cached rows writes every dv_i and adds to du.

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef float vf_any __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t vh_any __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

static inline vf splat(float x) { return x - vf{}; }

static inline float lane_sum(vf v) {
    float lanes[WIDTH];
    memcpy(lanes, &v, sizeof v);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

struct Float32 {
    typedef float value;
    static inline vf load(const float* p) { return *(const vf_any*)p; }
    static inline void store(float* p, vf v) { *(vf_any*)p = v; }
};

struct BFloat16 {
    typedef uint16_t value;
    static inline vf load(const uint16_t* p) {
        vu bits = __builtin_convertvector(*(const vh_any*)p, vu) << 16;
        return (vf)bits;
    }
    static inline void store(uint16_t* p, vf v) {  // round to nearest even; NaN stays NaN
        vu bits = (vu)v;
        vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        vu is_nan = (vu)(v != v);
        rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
        *(vh_any*)p = __builtin_convertvector(rounded, vh);
    }
};

struct Float16 {
    typedef uint16_t value;
#if defined(__AVX512F__) && WIDTH == 16
    static inline vf load(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    static inline void store(uint16_t* p, vf v) {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#elif defined(__F16C__) && WIDTH == 8
    static inline vf load(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    static inline void store(uint16_t* p, vf v) {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#else
    static inline vf load(const uint16_t* p) {
        vf v;
        for (int i = 0; i < WIDTH; i++) v[i] = half_to_float(p[i]);
        return v;
    }
    static inline void store(uint16_t* p, vf v) {
        for (int i = 0; i < WIDTH; i++) p[i] = float_to_half(v[i]);
    }
#endif
};

// `count` elements of a row: lanes past the end read as zero and are never written.
template <class S>
static inline vf load_some(const typename S::value* p, int64_t count) {
    if (count == WIDTH) return S::load(p);
    typename S::value lanes[WIDTH] = {};
    memcpy(lanes, p, count * sizeof *p);
    return S::load(lanes);
}

template <class S>
static inline void store_some(typename S::value* p, vf v, int64_t count) {
    if (count == WIDTH) return S::store(p, v);
    typename S::value lanes[WIDTH];
    S::store(lanes, v);
    memcpy(p, lanes, count * sizeof *p);
}

// sum of squares, and dot product with u, of one row
template <class S>
static inline void square_and_dot_piece(const typename S::value* row, const typename S::value* next, const float* u,
                                  int64_t width, float* square, float* dot) {
    vf s0{}, s1{}, s2{}, s3{}, d0{}, d1{}, d2{}, d3{};
    int64_t d = 0;
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH) {
        for (size_t byte = 0; byte < 4 * WIDTH * sizeof *row; byte += 64)
            __builtin_prefetch((const char*)(next + d) + byte, 0, 2);
        vf a = S::load(row + d), b = S::load(row + d + WIDTH);
        vf c = S::load(row + d + 2 * WIDTH), e = S::load(row + d + 3 * WIDTH);
        s0 += a * a, s1 += b * b, s2 += c * c, s3 += e * e;
        d0 += a * Float32::load(u + d), d1 += b * Float32::load(u + d + WIDTH);
        d2 += c * Float32::load(u + d + 2 * WIDTH), d3 += e * Float32::load(u + d + 3 * WIDTH);
    }
    for (; d + WIDTH <= width; d += WIDTH) {
        vf a = S::load(row + d);
        s0 += a * a, d0 += a * Float32::load(u + d);
    }
    if (d < width) {
        vf a = load_some<S>(row + d, width - d);
        s0 += a * a, d0 += a * load_some<Float32>(u + d, width - d);
    }
    *square = lane_sum((s0 + s1) + (s2 + s3));
    *dot = lane_sum((d0 + d1) + (d2 + d3));
}

static const int64_t TERMS = 64 * WIDTH;
template <class S>
static inline void square_and_dot(const typename S::value* row, const typename S::value* next, const float* u,
                                  int64_t width, float* square, float* dot) {
    float s = 0, t = 0;
    for (int64_t d = 0; d < width; d += TERMS) {
        float a, b;
        square_and_dot_piece<S>(row + d, next + d, u + d, width - d < TERMS ? width - d : TERMS, &a, &b);
        s += a, t += b;
    }
    *square = s, *dot = t;
}

// out[d] = (keep * out[d] if joined) + sum_i weight_i * row_i[d]; returns the sum of squares of the result
template <class S, class O>
static inline float mix(const typename S::value* const* rows, const float* weight, int64_t count, int64_t width,
                        bool joined, float keep, typename O::value* out) {
    vf square0{}, square1{};
    int64_t d = 0;
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH) {
        vf a{}, b{}, c{}, e{};
        if (joined) {
            a = keep * O::load(out + d), b = keep * O::load(out + d + WIDTH);
            c = keep * O::load(out + d + 2 * WIDTH), e = keep * O::load(out + d + 3 * WIDTH);
        }
        for (int64_t i = 0; i < count; i++) {
            const typename S::value* row = rows[i] + d;
            a += weight[i] * S::load(row), b += weight[i] * S::load(row + WIDTH);
            c += weight[i] * S::load(row + 2 * WIDTH), e += weight[i] * S::load(row + 3 * WIDTH);
        }
        O::store(out + d, a), O::store(out + d + WIDTH, b);
        O::store(out + d + 2 * WIDTH, c), O::store(out + d + 3 * WIDTH, e);
        square0 += a * a + b * b, square1 += c * c + e * e;
    }
    for (; d < width; d += WIDTH) {
        int64_t some = width - d < WIDTH ? width - d : WIDTH;
        vf a = joined ? keep * load_some<O>(out + d, some) : vf{};
        for (int64_t i = 0; i < count; i++) a += weight[i] * load_some<S>(rows[i] + d, some);
        store_some<O>(out + d, a, some);
        square0 += a * a;
    }
    return lane_sum(square0 + square1);
}

// out = factor * h * n, with h and n in float32; n may be null
template <class O>
static inline void scale_by(const float* h, float factor, const float* n, int64_t width, typename O::value* out) {
    for (int64_t d = 0; d < width; d += WIDTH) {
        int64_t some = width - d < WIDTH ? width - d : WIDTH;
        vf x = load_some<Float32>(h + d, some) * factor;
        if (n) x *= load_some<Float32>(n + d, some);
        store_some<O>(out + d, x, some);
    }
}

// The row to prefetch beside row i: `ahead` rows on, in this token or the next; the row itself at the end.
template <class V, class Call>
static inline const V* upcoming(const Call& f, int64_t token, int64_t end, int64_t i, int64_t ahead) {
    int64_t source = i + ahead;
    if (source >= f.num_sources) source -= f.num_sources, token++;
    if (token >= end) source = i, token = end - 1;
    return (const V*)f.sources[source] + token * f.strides[source];
}

template <class S>
static void forward_tokens(const Forward& f, int64_t begin, int64_t end, float* scratch) {
    typedef typename S::value value;
    const int64_t N = f.num_sources, D = f.width, T = f.tokens;
    float* h = scratch;
    double* score = (double*)(h + padded(D));
    const value** rows = (const value**)(score + N);
    float *r = (float*)(rows + N), *t = r + N, *e = t + N, *weight = e + N;
    const int64_t group = group_size(D, sizeof(value)), ahead = rows_ahead(N, D, sizeof(value));
    const bool through_h = f.norm_weight || N > group;
    for (int64_t token = begin; token < end; token++) {
        value* out = (value*)f.out + token * D;
        double highest = -INFINITY;
        float total = 0, square = 0;
        for (int64_t first = 0; first < N; first += group) {
            const int64_t last = first + group < N ? first + group : N;
            const double before = highest;
            for (int64_t i = first; i < last; i++) {
                rows[i] = (const value*)f.sources[i] + token * f.strides[i];
                const value* next = upcoming<value>(f, token, end, i, ahead);
                float squares, dot;
                square_and_dot<S>(rows[i], next, f.u, D, &squares, &dot);
                // In double: an error of a large score would be an error of the weights' exponent.
                const double inverse = 1 / sqrt((double)squares / D + f.eps);
                r[i] = (float)inverse, t[i] = dot;
                score[i] = N == 1 ? 0 : f.scale * inverse * dot;  // one source has weight one in any case
                if (score[i] > highest) highest = score[i];
            }
            const float keep = first ? expf((float)(before - highest)) : 0.0f;
            total *= keep;
            for (int64_t i = first; i < last; i++) total += e[i] = expf((float)(score[i] - highest));
            if (N > group) square = mix<S, Float32>(rows + first, e + first, last - first, D, first > 0, keep, h);
        }
        float factor = f.gain / total;
        if (N <= group) {
            for (int64_t i = 0; i < N; i++) weight[i] = e[i] * factor;
            if (through_h) square = mix<S, Float32>(rows, weight, N, D, false, 0, h);
            else square = mix<S, S>(rows, weight, N, D, false, 0, out);
            factor = 1;
        }
        float q = 0;
        if (f.norm_weight) {
            q = 1.0f / sqrtf(square * factor * factor / D + f.norm_eps);
            scale_by<S>(h, q * factor, f.norm_weight, D, out);
        } else if (through_h) {
            scale_by<S>(h, factor, nullptr, D, out);
        }
        if (f.norms) f.norms[token] = sqrtf(square) * factor;
        if (f.alpha) {
            // several groups: each e was taken against the maximum so far, so take it anew
            for (int64_t i = 0; i < N; i++)
                f.alpha[i * T + token] = (N <= group ? e[i] : expf((float)(score[i] - highest))) / total;
        }
        if (f.saved) {
            for (int64_t i = 0; i < N; i++) {
                f.saved[i * T + token] = r[i];
                f.saved[(N + i) * T + token] = t[i];
            }
            f.saved[2 * N * T + token] = q;
        }
    }
}

// dot product of a row with dh
template <class S>
static inline float row_dot_piece(const typename S::value* row, const typename S::value* next, const float* dh,
                            int64_t width) {
    vf d0{}, d1{}, d2{}, d3{};
    int64_t d = 0;
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH) {
        for (size_t byte = 0; byte < 4 * WIDTH * sizeof *row; byte += 64)
            __builtin_prefetch((const char*)(next + d) + byte, 0, 2);
        d0 += S::load(row + d) * Float32::load(dh + d);
        d1 += S::load(row + d + WIDTH) * Float32::load(dh + d + WIDTH);
        d2 += S::load(row + d + 2 * WIDTH) * Float32::load(dh + d + 2 * WIDTH);
        d3 += S::load(row + d + 3 * WIDTH) * Float32::load(dh + d + 3 * WIDTH);
    }
    for (; d < width; d += WIDTH) {
        int64_t some = width - d < WIDTH ? width - d : WIDTH;
        d0 += load_some<S>(row + d, some) * load_some<Float32>(dh + d, some);
    }
    return lane_sum((d0 + d1) + (d2 + d3));
}

template <class S>
static inline float row_dot(const typename S::value* row, const typename S::value* next, const float* dh,
                            int64_t width) {
    float t = 0;
    for (int64_t d = 0; d < width; d += TERMS)
        t += row_dot_piece<S>(row + d, next + d, dh + d, width - d < TERMS ? width - d : TERMS);
    return t;
}

// From dy to dh through y = q * h * n, in place of dy; adds dy * q * h to dn.
static inline void norm_backward(const float* h, float q, const float* n, float* dy, float* dn, int64_t width) {
    vf inner0{};
    float total = 0;
    int64_t d = 0;
    for (; d < width; d += WIDTH) {
        int64_t some = width - d < WIDTH ? width - d : WIDTH;
        vf hat = load_some<Float32>(h + d, some) * q, g = load_some<Float32>(dy + d, some);
        store_some<Float32>(dn + d, load_some<Float32>(dn + d, some) + g * hat, some);
        g *= load_some<Float32>(n + d, some);
        store_some<Float32>(dy + d, g, some);
        inner0 += g * hat;
        if ((d + WIDTH) % TERMS == 0) total += lane_sum(inner0), inner0 = vf{};
    }
    const float inner = (total + lane_sum(inner0)) / width;
    for (d = 0; d < width; d += WIDTH) {
        int64_t some = width - d < WIDTH ? width - d : WIDTH;
        vf hat = load_some<Float32>(h + d, some) * q, g = load_some<Float32>(dy + d, some);
        store_some<Float32>(dy + d, (g - hat * inner) * q, some);
    }
}

// One vector of every source's gradient: dv_i = a_i dh + b_i u + c_i v_i; returns sum_i b_i v_i.
template <class S>
static inline vf source_gradients(const Backward& f, const typename S::value* const* rows, const float* a,
                                  const float* b, const float* c, vf dh, vf u, int64_t token, int64_t d, int64_t some) {
    typedef typename S::value value;
    vf sum{};
    for (int64_t i = 0; i < f.num_sources; i++) {
        vf v = load_some<S>(rows[i] + d, some);
        sum += b[i] * v;
        if (!f.d_sources[i]) continue;
        value* out = (value*)f.d_sources[i] + token * f.width + d;
        store_some<S>(out, a[i] * dh + b[i] * u + c[i] * v, some);
    }
    return sum;
}

template <class S>
static void backward_tokens(const Backward& f, int64_t begin, int64_t end, float* scratch, double* du, double* dn) {
    typedef typename S::value value;
    const int64_t N = f.num_sources, D = f.width, T = f.tokens;
    float *dh = scratch, *h = dh + padded(D), *du_part = h + padded(D), *dn_part = du_part + padded(D);
    float *a = dn_part + padded(D), *b = a + N, *c = b + N, *p = c + N;
    const value** rows = (const value**)(p + N);
    const int64_t ahead = rows_ahead(N, D, sizeof(value));
    memset(du_part, 0, D * sizeof(float));
    memset(dn_part, 0, D * sizeof(float));
    for (int64_t token = begin; token < end; token++) {
        for (int64_t i = 0; i < N; i++) {
            rows[i] = (const value*)f.sources[i] + token * f.strides[i];
            a[i] = f.gain * f.alpha[i * T + token];
        }
        const value* dy = f.d_out ? (const value*)f.d_out + token * D : nullptr;
        if (dy)
            for (int64_t d = 0; d < D; d += WIDTH) {
                int64_t some = D - d < WIDTH ? D - d : WIDTH;
                store_some<Float32>(dh + d, load_some<S>(dy + d, some), some);
            }
        else
            memset(dh, 0, D * sizeof(float));
        if (f.norm_weight) {
            mix<S, Float32>(rows, a, N, D, false, 0, h);
            norm_backward(h, f.saved[2 * N * T + token], f.norm_weight, dh, dn_part, D);
        }
        int64_t top = 0;
        for (int64_t i = 0; i < N; i++) {
            const value* next = upcoming<value>(f, token, end, i, ahead);
            p[i] = f.gain * row_dot<S>(rows[i], next, dh, D);
            if (f.d_alpha) p[i] += f.d_alpha[i * T + token];
            if (f.alpha[i * T + token] > f.alpha[top * T + token]) top = i;
        }
        // Counted from the heaviest source's, so that a softmax near one-hot doesn't cancel: ds is unchanged.
        const float origin = p[top];
        float mean = 0;
        for (int64_t i = 0; i < N; i++) mean += f.alpha[i * T + token] * (p[i] -= origin);
        for (int64_t i = 0; i < N; i++) {
            const float r = f.saved[i * T + token], t = f.saved[(N + i) * T + token];
            b[i] = N == 1 ? 0 : f.alpha[i * T + token] * (p[i] - mean) * r * f.scale;
            c[i] = -b[i] * r * r * t / D;
        }
        for (int64_t d = 0; d < D; d += WIDTH) {
            const int64_t some = D - d < WIDTH ? D - d : WIDTH;
            vf dh_d = load_some<Float32>(dh + d, some), u_d = load_some<Float32>(f.u + d, some);
            vf sum = source_gradients<S>(f, rows, a, b, c, dh_d, u_d, token, d, some);
            store_some<Float32>(du_part + d, load_some<Float32>(du_part + d, some) + sum, some);
        }
        // Sums over tokens go into double every few tokens, so that their error does not grow with the length.
        if ((token - begin) % 16 == 15 || token + 1 == end) {
            for (int64_t d = 0; d < D; d++) du[d] += du_part[d], du_part[d] = 0;
            if (f.norm_weight)
                for (int64_t d = 0; d < D; d++) dn[d] += dn_part[d], dn_part[d] = 0;
        }
    }
}

template <class S>
static inline float difference_square(const typename S::value* after, const typename S::value* before,
                                      int64_t width) {
    vf square0{}, square1{};
    int64_t d = 0;
    for (; d + 2 * WIDTH <= width; d += 2 * WIDTH) {
        vf a = S::load(after + d) - S::load(before + d);
        vf b = S::load(after + d + WIDTH) - S::load(before + d + WIDTH);
        square0 += a * a, square1 += b * b;
    }
    for (; d < width; d += WIDTH) {
        int64_t some = width - d < WIDTH ? width - d : WIDTH;
        vf a = load_some<S>(after + d, some) - load_some<S>(before + d, some);
        square0 += a * a;
    }
    return lane_sum(square0 + square1);
}

template <class S>
static void difference_tokens(const Difference& f, int64_t begin, int64_t end) {
    typedef typename S::value value;
    const value *after = (const value*)f.after, *before = (const value*)f.before;
    for (int64_t token = begin; token < end; token++)
        f.norms[token] = sqrtf(difference_square<S>(after + token * f.width, before + token * f.width, f.width));
}

static void forward_range(const Forward& f, int64_t begin, int64_t end, float* scratch) {
    if (f.dtype == FLOAT32) forward_tokens<Float32>(f, begin, end, scratch);
    else if (f.dtype == BFLOAT16) forward_tokens<BFloat16>(f, begin, end, scratch);
    else forward_tokens<Float16>(f, begin, end, scratch);
}

static void backward_range(const Backward& f, int64_t begin, int64_t end, float* scratch, double* du, double* dn) {
    if (f.dtype == FLOAT32) backward_tokens<Float32>(f, begin, end, scratch, du, dn);
    else if (f.dtype == BFLOAT16) backward_tokens<BFloat16>(f, begin, end, scratch, du, dn);
    else backward_tokens<Float16>(f, begin, end, scratch, du, dn);
}

static void difference_range(const Difference& f, int64_t begin, int64_t end) {
    if (f.dtype == FLOAT32) difference_tokens<Float32>(f, begin, end);
    else if (f.dtype == BFLOAT16) difference_tokens<BFloat16>(f, begin, end);
    else difference_tokens<Float16>(f, begin, end);
}
