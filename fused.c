/* Phase 1 of the depth reads (mix_finished in model.py) on a CPU, token by token: all that a token needs of its K sources and R routes
   is in the cache after its first use, where single operations, or torch.compile's graph of them, pass over memory again and again.

   REAL is float or double. Arrays by row, D wide where they end in D; K or R pointers where a letter stands before the parenthesis:

   states, d_states, passed   K (tokens, D)     inverses      K (tokens)          logits        (tokens, R, K)
   mixtures, d_mixtures       R (tokens, D)     w, d_w        (R, D)              lse, d_lse    (tokens, R)
   w are the directions, g * w in model.py. gain, d_gain (D): of the RMSNorm after the read; the first `normed` mixtures are given, and
   their gradients taken, normalised.                                                                                               */

#include <tgmath.h>

typedef REAL real;

static real dot(const real *a, const real *b, long D) {
    real sum = 0;
    for (long d = 0; d < D; d++) sum += a[d] * b[d];
    return sum;
}

/* x += c y */
static void add(real *restrict x, real c, const real *restrict y, long D) {
    for (long d = 0; d < D; d++) x[d] += c * y[d];
}

/* h = sum_k alpha_k s_k of token t */
static void mix(real *h, const real *alpha, const real *const *states, long K, long t, long D) {
    for (long d = 0; d < D; d++) h[d] = 0;
    for (long k = 0; k < K; k++) add(h, alpha[k], states[k] + t * D, D);
}

/* Every source and mixture is a place in memory of its own, too many for the processor to foresee: ask for the next token's rows. */
static void prefetch(const real *row, long D) {
    for (long d = 0; d < D; d += 64 / sizeof(real)) __builtin_prefetch(row + d);
}

static void forward_tokens(long first, long last, long D, long K, long R, long normed, real eps, const real *const *states,
                           const real *const *inverses, const real *w, const real *gain, real *logits, real *lse, real *const *mixtures) {
    for (long t = first; t < last; t++) {
        for (long k = 0; k < K; k++) {
            const real *s = states[k] + t * D;
            prefetch(s + D, D);
            for (long r = 0; r < R; r++) logits[(t * R + r) * K + k] = dot(w + r * D, s, D) * inverses[k][t];
        }
        for (long r = 0; r < R; r++) {
            const real *l = logits + (t * R + r) * K;
            real *h = mixtures[r] + t * D, alpha[K], top = l[0], sum = 0;
            for (long k = 1; k < K; k++) top = l[k] > top ? l[k] : top;
            for (long k = 0; k < K; k++) sum += alpha[k] = exp(l[k] - top);
            for (long k = 0; k < K; k++) alpha[k] /= sum;
            lse[t * R + r] = top + log(sum);
            prefetch(h + D, D);
            mix(h, alpha, states, K, t, D);
            if (r < normed) {
                const real inverse = 1 / sqrt(dot(h, h, D) / D + eps);
                for (long d = 0; d < D; d++) h[d] *= inverse * gain[d];
            }
        }
    }
}

/* d_x, the gradient of the normalised mixture, and the mixture h -> its gradient, in h's place; adds to d_gain */
static void norm_backward(real *restrict h, const real *restrict d_x, const real *restrict gain, real *restrict d_gain, real eps, long D) {
    real square = 0, along = 0;
    for (long d = 0; d < D; d++) square += h[d] * h[d], along += gain[d] * d_x[d] * h[d];
    const real inverse = 1 / sqrt(square / D + eps);
    along *= inverse * inverse * inverse / D;
    for (long d = 0; d < D; d++) {
        d_gain[d] += d_x[d] * h[d] * inverse;
        h[d] = gain[d] * d_x[d] * inverse - along * h[d];
    }
}

/* What a route adds to the gradients of a source, alpha G + c w, and of its direction, c s */
static void add_route(real *restrict d_s, real *restrict d_w, real alpha, const real *restrict g, real c, const real *restrict w,
                      const real *restrict s, long D) {
    for (long d = 0; d < D; d++) {
        d_s[d] += alpha * g[d] + c * w[d];
        d_w[d] += c * s[d];
    }
}

/* passed[k]: the gradient of source k from the reads after this one, NULL where there is none; alpha and d_logits (R, K) and mixture
   (normed, D) are a thread's own, to work in */
static void backward_tokens(long first, long last, long D, long K, long R, long normed, real eps, const real *const *states,
                            const real *const *inverses, const real *w, const real *gain, const real *logits, const real *lse, const real *d_lse,
                            const real *const *d_mixtures, const real *const *passed, real *alpha, real *d_logits, real *mixture, real *d_w,
                            real *d_gain, real *const *d_states) {
    const real *g[R];
    for (long t = first; t < last; t++) {
        const real *l = logits + t * R * K;
        for (long k = 0; k < K; k++) prefetch(states[k] + (t + 1) * D, D);
        for (long r = 0; r < R; r++)
            for (long k = 0; k < K; k++) alpha[r * K + k] = exp(l[r * K + k] - lse[t * R + r]);
        for (long r = 0; r < normed; r++) mix(mixture + r * D, alpha + r * K, states, K, t, D);
        for (long r = 0; r < R; r++) {
            real *a = alpha + r * K, *d_l = d_logits + r * K, mean = 0;
            g[r] = d_mixtures[r] + t * D;
            prefetch(g[r] + D, D);
            if (r < normed) {
                norm_backward(mixture + r * D, g[r], gain, d_gain, eps, D);
                g[r] = mixture + r * D;
            }
            for (long k = 0; k < K; k++) d_l[k] = dot(g[r], states[k] + t * D, D);
            for (long k = 0; k < K; k++) mean += a[k] * d_l[k];
            for (long k = 0; k < K; k++) d_l[k] = a[k] * (d_l[k] - mean + d_lse[t * R + r]);
        }
        for (long k = 0; k < K; k++) {
            const real inverse = inverses[k][t], *s = states[k] + t * D;
            real *d_s = d_states[k] + t * D, through_rms = 0;
            prefetch(d_s + D, D);
            for (long r = 0; r < R; r++) through_rms -= d_logits[r * K + k] * l[r * K + k];
            through_rms *= inverse * inverse / D;
            if (passed[k]) {
                const real *after = passed[k] + t * D;
                prefetch(after + D, D);
                for (long d = 0; d < D; d++) d_s[d] = after[d];
            } else
                for (long d = 0; d < D; d++) d_s[d] = 0;
            add(d_s, through_rms, s, D);
            for (long r = 0; r < R; r++) add_route(d_s, d_w + r * D, alpha[r * K + k], g[r], d_logits[r * K + k] * inverse, w + r * D, s, D);
        }
    }
}

/* Each of `threads` threads takes a run of tokens; in the backward it has a d_w and a d_gain of its own, zero at the start, and a place to
   work in: work (threads, 2 R K + normed D). */

void forward(long threads, long tokens, long D, long K, long R, long normed, double eps, const real *const *states, const real *const *inverses,
             const real *w, const real *gain, real *logits, real *lse, real *const *mixtures) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < threads; i++)
        forward_tokens(tokens * i / threads, tokens * (i + 1) / threads, D, K, R, normed, eps, states, inverses, w, gain, logits, lse, mixtures);
}

void backward(long threads, long tokens, long D, long K, long R, long normed, double eps, const real *const *states, const real *const *inverses,
              const real *w, const real *gain, const real *logits, const real *lse, const real *d_lse, const real *const *d_mixtures,
              const real *const *passed, real *work, real *d_w, real *d_gain, real *const *d_states) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < threads; i++) {
        real *alpha = work + i * (2 * R * K + normed * D), *d_logits = alpha + R * K, *mixture = d_logits + R * K;
        backward_tokens(tokens * i / threads, tokens * (i + 1) / threads, D, K, R, normed, eps, states, inverses, w, gain, logits, lse, d_lse,
                        d_mixtures, passed, alpha, d_logits, mixture, d_w + i * R * D, d_gain + i * D, d_states);
    }
}
