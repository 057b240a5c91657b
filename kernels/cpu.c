/* One depth read, depth_read in model.py, token by token: all that a token needs of its K sources is in the cache after its first use.

       l_k = w . s_k / rms(s_k)      alpha = softmax over k of l      h = sum_k alpha_k s_k      x = gain * h / rms(h)

   cpu.py compiles this for one REAL (float or double), WIDTH, number of ROUTES, and NORMALISED (1: x is returned, 0: h). So loops
   over routes unroll, and sums stay in registers. Arrays are contiguous. K or R before a parenthesis: an array of that many pointers.

       sources, d_sources   K (tokens, D)     outputs, d_outputs   R (tokens, D)     w, d_w   (R, D)     gain, d_gain   (D,)
       scalars              (tokens, K R + R + K): l of each source and route, then log sum exp l of each route, then 1 / rms of each source

   w holds the directions, g * w in model.py. Indices: token t, source k, route r, vector c of a row.                                  */

#include <tgmath.h>

typedef REAL real;

#if defined __AVX512F__
enum { REGISTER = 64 }; /* bytes */
#elif defined __AVX__
enum { REGISTER = 32 };
#else
enum { REGISTER = 16 };
#endif

enum {
    D = WIDTH,
    R = ROUTES,
    FIT = REGISTER / sizeof(real),
    POWER = D & -D, /* the largest power of two that divides D */
    LANES = POWER < FIT ? POWER : FIT,
    C = D / LANES, /* vectors a row */
    TILE = 8       /* tokens whose exponentials are taken together, enough to fill vectors; and how far ahead prefetches ask */
};

/* Arithmetic is lane by lane. A row may begin anywhere that a real may. */
typedef real vec __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

static inline real total(vec x) {
    real sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* Row t of x (any, D) */
static inline vec *row(const real *x, long t) { return (vec *)(x + t * D); }

/* The processor foresees few streams by itself: ask for the rows TILE tokens on. Past the end no prefetch faults. Into the second-level
   cache (2): the first can await few lines at a time, and loads would queue behind them. */
static inline void prefetch(const vec *x) {
    for (int c = 0; c < C; c += 64 / sizeof(vec)) __builtin_prefetch(x + c, 0, 2);
}

/* x -> e^x in place for n values x <= 0; a float below -87 is taken for -87. This loop becomes vectors, where one library call a value would
   be a third of the float forward at D 64. x = k log 2 + f: 2^k from its bits, e^f by Taylor's series, |f|^8 / 8! < 6e-9. The relative error
   is about 6e-8 (1 - x), what a rounding of x does. Not static: a test calls it. */
void exponentials(real *x, long n) {
    for (long i = 0; i < n; i++) {
        if (sizeof(real) != sizeof(float)) {
            x[i] = exp(x[i]);
            continue;
        }
        const real y = x[i] < -87 ? -87 : x[i], k = rint(y * 1.44269504f), f = y - k * 0.693147181f;
        const union {
            unsigned bits;
            float power;
        } two = {(unsigned)((int)k + 127) << 23};
        real series = 1;
        for (int j = 7; j > 0; j--) series = 1 + series * f * (1.0f / j);
        x[i] = series * two.power;
    }
}

/* out_r = x_r . s for x (R, D); returns s . s */
static inline real dots(real *out, const vec *x, const vec *s) {
    vec sum[R] = {0}, square = {0};
    for (int c = 0; c < C; c++) {
        square += s[c] * s[c];
        for (int r = 0; r < R; r++) sum[r] += x[r * C + c] * s[c];
    }
    for (int r = 0; r < R; r++) out[r] = total(sum[r]);
    return total(square);
}

/* h_r = sum_k alpha_kr s_k of token t */
static inline void mix(vec *const *h, const real (*alpha)[R], const real *const *sources, long K, long t) {
    for (int c = 0; c < C; c++) {
        vec sum[R] = {0};
        for (long k = 0; k < K; k++) {
            const vec s = row(sources[k], t)[c];
            for (int r = 0; r < R; r++) sum[r] += alpha[k][r] * s;
        }
        for (int r = 0; r < R; r++) h[r][c] = sum[r];
    }
}

/* h -> gain * h / rms(h), in place */
static inline void normalise(vec *h, const vec *gain, real eps) {
    vec square = {0};
    for (int c = 0; c < C; c++) square += h[c] * h[c];
    const real inverse = 1 / sqrt(total(square) / D + eps);
    for (int c = 0; c < C; c++) h[c] *= inverse * gain[c];
}

/* h -> its gradient, in place, from d_x of x = gain * h / rms(h); adds to d_gain */
static inline void normalise_backward(vec *h, const vec *d_x, const vec *gain, vec *d_gain, real eps) {
    vec square = {0}, product = {0};
    for (int c = 0; c < C; c++) square += h[c] * h[c], product += gain[c] * d_x[c] * h[c];
    const real inverse = 1 / sqrt(total(square) / D + eps), along = total(product) * inverse * inverse * inverse / D;
    for (int c = 0; c < C; c++) {
        d_gain[c] += d_x[c] * h[c] * inverse;
        h[c] = gain[c] * d_x[c] * inverse - along * h[c];
    }
}

static void forward_tokens(long first, long last, long K, real eps, const real *const *sources, const real *w, const real *gain, real *scalars,
                           real *const *outputs) {
    const long size = K * R + R + K;
    real alphas[TILE * K][R];
    for (long start = first; start < last; start += TILE) {
        const long end = start + TILE < last ? start + TILE : last;
        for (long t = start; t < end; t++) {
            real(*l)[R] = (real(*)[R])(scalars + t * size), *lse = l[K], *inverse = lse + R, (*alpha)[R] = alphas + (t - start) * K;
            for (long k = 0; k < K; k++) {
                prefetch(row(sources[k], t + TILE));
                inverse[k] = 1 / sqrt(dots(l[k], row(w, 0), row(sources[k], t)) / D + eps);
                for (int r = 0; r < R; r++) l[k][r] *= inverse[k];
                for (int r = 0; r < R; r++) lse[r] = k && lse[r] > l[k][r] ? lse[r] : l[k][r]; /* the largest; below, the whole */
            }
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) alpha[k][r] = l[k][r] - lse[r];
        }
        exponentials(alphas[0], (end - start) * K * R);
        for (long t = start; t < end; t++) {
            real(*alpha)[R] = alphas + (t - start) * K, *lse = scalars + t * size + K * R;
            real sum[R] = {0};
            vec *h[R];
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) sum[r] += alpha[k][r];
            for (int r = 0; r < R; r++) lse[r] += log(sum[r]);
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) alpha[k][r] /= sum[r];
            for (int r = 0; r < R; r++) h[r] = row(outputs[r], t), prefetch(row(outputs[r], t + TILE));
            mix(h, alpha, sources, K, t);
            if (NORMALISED)
                for (int r = 0; r < R; r++) normalise(h[r], row(gain, 0), eps);
        }
    }
}

/* With G = dL/dh:  dl_k = alpha_k (G . s_k - G . h)     ds_k = alpha_k G + dl_k w / rms_k - dl_k l_k s_k / (D rms_k^2)     dw = sum of dl_k s_k / rms_k
   d_h (R, D), a thread's own to work in: the mixtures, computed again, then their gradients. */
static void backward_tokens(long first, long last, long K, real eps, const real *const *sources, const real *w, const real *gain,
                            const real *scalars, const real *const *d_outputs, real *d_h, real *d_w, real *d_gain, real *const *d_sources) {
    const long size = K * R + R + K;
    real alphas[TILE * K][R], d_alpha[K][R], d_dot[K][R], through_rms[K]; /* d_dot: of w . s */
    vec *h[R];
    for (int r = 0; r < R; r++) h[r] = row(d_h, r);
    for (long start = first; start < last; start += TILE) {
        const long end = start + TILE < last ? start + TILE : last;
        for (long t = start; t < end; t++)
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) alphas[(t - start) * K + k][r] = scalars[t * size + k * R + r] - scalars[t * size + K * R + r];
        exponentials(alphas[0], (end - start) * K * R);
        for (long t = start; t < end; t++) {
            const real(*alpha)[R] = alphas + (t - start) * K, *l = scalars + t * size, *inverse = l + K * R + R;
            real mean[R] = {0}; /* of d_alpha by alpha: G . h */
            if (NORMALISED) mix(h, alpha, sources, K, t);
            for (int r = 0; r < R; r++) {
                const vec *d_output = row(d_outputs[r], t);
                prefetch(row(d_outputs[r], t + TILE));
                if (NORMALISED)
                    normalise_backward(h[r], d_output, row(gain, 0), row(d_gain, 0), eps);
                else
                    for (int c = 0; c < C; c++) h[r][c] = d_output[c];
            }
            for (long k = 0; k < K; k++) {
                prefetch(row(sources[k], t + TILE));
                prefetch(row(d_sources[k], t + TILE));
                dots(d_alpha[k], row(d_h, 0), row(sources[k], t));
                for (int r = 0; r < R; r++) mean[r] += alpha[k][r] * d_alpha[k][r];
            }
            for (long k = 0; k < K; k++) {
                through_rms[k] = 0;
                for (int r = 0; r < R; r++) {
                    const real d_logit = alpha[k][r] * (d_alpha[k][r] - mean[r]);
                    through_rms[k] -= d_logit * l[k * R + r] * inverse[k] * inverse[k] / D;
                    d_dot[k][r] = d_logit * inverse[k];
                }
            }
            for (int c = 0; c < C; c++) {
                vec d_h_c[R], w_c[R], d_w_c[R];
                for (int r = 0; r < R; r++) d_h_c[r] = row(d_h, r)[c], w_c[r] = row(w, r)[c], d_w_c[r] = row(d_w, r)[c];
                for (long k = 0; k < K; k++) {
                    const vec s = row(sources[k], t)[c];
                    vec d_s = through_rms[k] * s;
                    for (int r = 0; r < R; r++) {
                        d_s += alpha[k][r] * d_h_c[r] + d_dot[k][r] * w_c[r];
                        d_w_c[r] += d_dot[k][r] * s;
                    }
                    row(d_sources[k], t)[c] = d_s;
                }
                for (int r = 0; r < R; r++) row(d_w, r)[c] = d_w_c[r];
            }
        }
    }
}

/* The tokens are cut into `threads` runs. In the backward each has its own sums (threads, R + 1, D), zero at the start: d_w and, in the last
   row, d_gain, for the caller to add up. And it has a place to work in, work (threads, R, D). */

void forward(long threads, long tokens, long K, double eps, const real *const *sources, const real *w, const real *gain, real *scalars,
             real *const *outputs) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < threads; i++)
        forward_tokens(tokens * i / threads, tokens * (i + 1) / threads, K, eps, sources, w, gain, scalars, outputs);
}

void backward(long threads, long tokens, long K, double eps, const real *const *sources, const real *w, const real *gain, const real *scalars,
              const real *const *d_outputs, real *work, real *sums, real *const *d_sources) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < threads; i++)
        backward_tokens(tokens * i / threads, tokens * (i + 1) / threads, K, eps, sources, w, gain, scalars, d_outputs, work + i * R * D,
                        sums + i * (R + 1) * D, sums + (i * (R + 1) + R) * D, d_sources);
}
