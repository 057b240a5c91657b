/* Phase 1 of the depth reads (mix_finished in model.py) on a CPU, token by token: all that a token needs of its K sources and R routes
   is in the cache after its first use, where separate operations, or torch.compile's graph of them, pass over memory again and again.

   fused.py compiles this for one REAL (float or double), WIDTH, number of ROUTES and of NORMALISED mixtures: so loops over routes unroll,
   and sums over sources stay in registers. Arrays are contiguous; K or R before the parenthesis is an array of that many pointers:

   states, d_states, passed   K (tokens, D)     inverses      K (tokens)          logits        (tokens, K, R)
   mixtures, d_mixtures       R (tokens, D)     w, d_w        (R, D)              lse, d_lse    (tokens, R)

   w are the directions, g * w in model.py; inverses 1 / rms of the states; alpha (K, R) the weights of a token; gain, d_gain (D) of the
   RMSNorm after the read, which the first NORMED mixtures go through before they are returned. Indices: token t, source k, route r, and c,
   the vectors of a row. The formulas of the backward are those of MixFinished and state_gradient in model.py.                            */

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
    NORMED = NORMALISED,
    FIT = REGISTER / sizeof(real),
    POWER = D & -D, /* the largest power of two that divides D */
    LANES = POWER < FIT ? POWER : FIT,
    C = D / LANES, /* vectors a row */
    TILE = 8       /* tokens done together: exponentials enough to fill vectors; and how far ahead prefetches ask */
};

/* Arithmetic on it is lane by lane, with a real for all lanes alike. A row may begin anywhere that a real may. */
typedef real vec __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

static inline real total(vec x) {
    real sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* Row t of x (any, D) */
static inline vec *row(const real *x, long t) { return (vec *)(x + t * D); }

/* Sources and mixtures are more streams than the processor itself foresees: ask for the rows TILE tokens on (past the end too: no prefetch
   faults). Into the second-level cache, the 2: the first can await few lines at a time, and loads would queue behind them. */
static inline void prefetch(const vec *x) {
    for (int c = 0; c < C; c += 64 / sizeof(vec)) __builtin_prefetch(x + c, 0, 2);
}

/* x -> e^x for n values x <= 0, in place; a float below -87 is taken for -87. One library call a value would be a third of the float forward
   at D 64; this loop becomes vectors. x = k log 2 + f: 2^k from its bits, e^f by Taylor's series, |f|^8 / 8! < 6e-9. Rounding k log 2
   makes the relative error about 6e-8 (1 - x), what a rounding of x does. Not static: a test calls it. */
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

/* out_r = x_r . s for x (R, D) */
static inline void dots(real *out, const vec *x, const vec *s) {
    vec sum[R] = {0};
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) sum[r] += x[r * C + c] * s[c];
    for (int r = 0; r < R; r++) out[r] = total(sum[r]);
}

/* h_r = sum_k alpha_kr s_k of token t, for the first `routes` routes */
static inline void mix(vec *const *h, const real (*alpha)[R], const real *const *states, long K, long t, const int routes) {
    for (int c = 0; c < C; c++) {
        vec sum[R] = {0};
        for (long k = 0; k < K; k++) {
            const vec s = row(states[k], t)[c];
            for (int r = 0; r < routes; r++) sum[r] += alpha[k][r] * s;
        }
        for (int r = 0; r < routes; r++) h[r][c] = sum[r];
    }
}

/* h -> its RMSNorm, in place */
static inline void normalise(vec *h, const vec *gain, real eps) {
    vec square = {0};
    for (int c = 0; c < C; c++) square += h[c] * h[c];
    const real inverse = 1 / sqrt(total(square) / D + eps);
    for (int c = 0; c < C; c++) h[c] *= inverse * gain[c];
}

/* y = gain * h / rms(h): h -> its gradient, in place, from d_y; adds to d_gain */
static inline void norm_backward(vec *h, const vec *d_y, const vec *gain, vec *d_gain, real eps) {
    vec square = {0}, product = {0};
    for (int c = 0; c < C; c++) square += h[c] * h[c], product += gain[c] * d_y[c] * h[c];
    const real inverse = 1 / sqrt(total(square) / D + eps), along = total(product) * inverse * inverse * inverse / D;
    for (int c = 0; c < C; c++) {
        d_gain[c] += d_y[c] * h[c] * inverse;
        h[c] = gain[c] * d_y[c] * inverse - along * h[c];
    }
}

static void forward_tokens(long first, long last, long K, real eps, const real *const *states, const real *const *inverses, const real *w,
                           const real *gain, real (*logits)[R], real (*lse)[R], real *const *mixtures) {
    real alphas[TILE * K][R];
    for (long start = first; start < last; start += TILE) {
        const long end = start + TILE < last ? start + TILE : last;
        for (long t = start; t < end; t++) {
            real(*l)[R] = logits + t * K, (*alpha)[R] = alphas + (t - start) * K;
            for (long k = 0; k < K; k++) {
                prefetch(row(states[k], t + TILE));
                dots(l[k], row(w, 0), row(states[k], t));
                for (int r = 0; r < R; r++) l[k][r] *= inverses[k][t];
                for (int r = 0; r < R; r++) lse[t][r] = k && lse[t][r] > l[k][r] ? lse[t][r] : l[k][r]; /* the largest; below, the whole */
            }
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) alpha[k][r] = l[k][r] - lse[t][r];
        }
        exponentials(alphas[0], (end - start) * K * R);
        for (long t = start; t < end; t++) {
            real(*alpha)[R] = alphas + (t - start) * K;
            real sum[R] = {0};
            vec *h[R];
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) sum[r] += alpha[k][r];
            for (int r = 0; r < R; r++) lse[t][r] += log(sum[r]);
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) alpha[k][r] /= sum[r];
            for (int r = 0; r < R; r++) h[r] = row(mixtures[r], t), prefetch(row(mixtures[r], t + TILE));
            mix(h, alpha, states, K, t, R);
            for (int r = 0; r < NORMED; r++) normalise(h[r], row(gain, 0), eps);
        }
    }
}

/* passed[k]: the gradient of states[k] from the reads after this one, NULL where there is none. d_h (R, D), a thread's own to work in: the
   mixtures h that were normalised, computed again, then the gradients of all h. */
static void backward_tokens(long first, long last, long K, real eps, const real *const *states, const real *const *inverses, const real *w,
                            const real *gain, const real (*logits)[R], const real (*lse)[R], const real (*d_lse)[R],
                            const real *const *d_mixtures, const real *const *passed, real *d_h, real *d_w, real *d_gain, real *const *d_states) {
    real alphas[TILE * K][R], d_alpha[K][R], d_dot[K][R], through_rms[K]; /* d_dot: of w . s, so d_w += d_dot s, d_s += d_dot w + through_rms s */
    vec *h[R];
    for (int r = 0; r < R; r++) h[r] = row(d_h, r);
    for (long start = first; start < last; start += TILE) {
        const long end = start + TILE < last ? start + TILE : last;
        for (long t = start; t < end; t++)
            for (long k = 0; k < K; k++)
                for (int r = 0; r < R; r++) alphas[(t - start) * K + k][r] = logits[t * K + k][r] - lse[t][r];
        exponentials(alphas[0], (end - start) * K * R);
        for (long t = start; t < end; t++) {
            const real(*alpha)[R] = alphas + (t - start) * K;
            real mean[R] = {0}; /* of d_alpha by alpha */
            mix(h, alpha, states, K, t, NORMED);
            for (int r = 0; r < R; r++) {
                const vec *d_mixture = row(d_mixtures[r], t);
                prefetch(row(d_mixtures[r], t + TILE));
                if (r < NORMED)
                    norm_backward(h[r], d_mixture, row(gain, 0), row(d_gain, 0), eps);
                else
                    for (int c = 0; c < C; c++) h[r][c] = d_mixture[c];
            }
            for (long k = 0; k < K; k++) {
                prefetch(row(states[k], t + TILE));
                prefetch(row(d_states[k], t + TILE));
                if (passed[k]) prefetch(row(passed[k], t + TILE));
                dots(d_alpha[k], row(d_h, 0), row(states[k], t));
                for (int r = 0; r < R; r++) mean[r] += alpha[k][r] * d_alpha[k][r];
            }
            for (long k = 0; k < K; k++) /* apart from the next loop: sums in any order, -fassociative-math, must not lose a d_lse that is small */
                for (int r = 0; r < R; r++) d_alpha[k][r] -= mean[r];
            for (long k = 0; k < K; k++) {
                const real inverse = inverses[k][t];
                through_rms[k] = 0;
                for (int r = 0; r < R; r++) {
                    const real d_logit = alpha[k][r] * (d_alpha[k][r] + d_lse[t][r]);
                    through_rms[k] -= d_logit * logits[t * K + k][r] * inverse * inverse / D;
                    d_dot[k][r] = d_logit * inverse;
                }
            }
            for (int c = 0; c < C; c++) {
                vec d_h_c[R], w_c[R], d_w_c[R];
                for (int r = 0; r < R; r++) d_h_c[r] = row(d_h, r)[c], w_c[r] = row(w, r)[c], d_w_c[r] = row(d_w, r)[c];
                for (long k = 0; k < K; k++) {
                    const vec s = row(states[k], t)[c];
                    vec d_s = through_rms[k] * s;
                    if (passed[k]) d_s += row(passed[k], t)[c];
                    for (int r = 0; r < R; r++) {
                        d_s += alpha[k][r] * d_h_c[r] + d_dot[k][r] * w_c[r];
                        d_w_c[r] += d_dot[k][r] * s;
                    }
                    row(d_states[k], t)[c] = d_s;
                }
                for (int r = 0; r < R; r++) row(d_w, r)[c] = d_w_c[r];
            }
        }
    }
}

/* The tokens are cut into `threads` runs, one a thread. In the backward each run has its own sums (threads, R + 1, D), zero at the start, d_w
   and in the last row d_gain, for the caller to add up; and a place to work in, work (threads, R, D). */

void forward(long threads, long tokens, long K, double eps, const real *const *states, const real *const *inverses, const real *w,
             const real *gain, real (*logits)[R], real (*lse)[R], real *const *mixtures) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < threads; i++)
        forward_tokens(tokens * i / threads, tokens * (i + 1) / threads, K, eps, states, inverses, w, gain, logits, lse, mixtures);
}

void backward(long threads, long tokens, long K, double eps, const real *const *states, const real *const *inverses, const real *w,
              const real *gain, const real (*logits)[R], const real (*lse)[R], const real (*d_lse)[R], const real *const *d_mixtures,
              const real *const *passed, real *work, real *sums, real *const *d_states) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < threads; i++)
        backward_tokens(tokens * i / threads, tokens * (i + 1) / threads, K, eps, states, inverses, w, gain, logits, lse, d_lse, d_mixtures,
                        passed, work + i * R * D, sums + i * (R + 1) * D, sums + (i * (R + 1) + R) * D, d_states);
}
