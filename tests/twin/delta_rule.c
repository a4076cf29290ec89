/* Gated delta rule, one token after another, forward and backward, for heads of D x D in float32.
 *
 * Written out because the chunked form in torch spends its time in copies at these small sizes; a state of 16 KB stays in
 * the first cache. The state before every SPAN-th token is kept, the ones between are computed again in the backward pass.
 *
 *   S' = exp(g) S        d = beta (v - k S')        S = S' + k d        o = q S
 *
 * q, k: [B, T, HK, D] (q scaled, both normalised); v, o: [B, T, HV, D]; g, beta: [B, T, HV]; fresh: [B, T], 1 where a chat
 * begins (the state is zero there). Value head h reads key head h / (HV / HK). kept: [B, HV, ceil(T / SPAN), D, D].
 */
#include <math.h>
#include <string.h>

#define D 64
#define SPAN 16

typedef float row[D] __attribute__((aligned(64)));

static void step(row *s, const float *q, const float *k, const float *v, float g, float beta, int fresh, float *o)
{
    float u[D] = {0}, r[D] = {0};
    const float a = fresh ? 0.0f : expf(g);
    for (int i = 0; i < D; i++) {
        const float ki = k[i];
        for (int j = 0; j < D; j++) {
            s[i][j] *= a;
            u[j] += ki * s[i][j];
        }
    }
    for (int j = 0; j < D; j++)
        u[j] = beta * (v[j] - u[j]);
    for (int i = 0; i < D; i++) {
        const float ki = k[i], qi = q[i];
        for (int j = 0; j < D; j++) {
            s[i][j] += ki * u[j];
            r[j] += qi * s[i][j];
        }
    }
    if (o)
        memcpy(o, r, sizeof r);
}

void delta_forward(int B, int T, int HK, int HV, const float *q, const float *k, const float *v, const float *g,
                   const float *beta, const unsigned char *fresh, float *o, float *kept)
{
    const int spans = (T + SPAN - 1) / SPAN;
    for (int b = 0; b < B; b++)
        for (int h = 0; h < HV; h++) {
            row s[D];
            memset(s, 0, sizeof s);
            for (int t = 0; t < T; t++) {
                const long at = (long)b * T + t, kk = (at * HK + h / (HV / HK)) * D, vv = (at * HV + h) * D;
                if (t % SPAN == 0)
                    memcpy(kept + (((long)b * HV + h) * spans + t / SPAN) * D * D, s, sizeof s);
                step(s, q + kk, k + kk, v + vv, g[at * HV + h], beta[at * HV + h], fresh[at], o + vv);
            }
        }
}

/* dq, dk must come in as zeros: the value heads of one key head add to them. */
void delta_backward(int B, int T, int HK, int HV, const float *q, const float *k, const float *v, const float *g,
                    const float *beta, const unsigned char *fresh, const float *kept, const float *go, float *dq,
                    float *dk, float *dv, float *dg, float *dbeta)
{
    const int spans = (T + SPAN - 1) / SPAN;
    static __thread row before[SPAN + 1][D];
    for (int b = 0; b < B; b++)
        for (int h = 0; h < HV; h++) {
            row ds[D];
            memset(ds, 0, sizeof ds);
            for (int span = spans - 1; span >= 0; span--) {
                const int first = span * SPAN, last = first + SPAN < T ? first + SPAN : T;
                memcpy(before[0], kept + (((long)b * HV + h) * spans + span) * D * D, sizeof before[0]);
                for (int t = first; t < last; t++) {
                    const long at = (long)b * T + t, kk = (at * HK + h / (HV / HK)) * D, vv = (at * HV + h) * D;
                    memcpy(before[t - first + 1], before[t - first], sizeof before[0]);
                    step(before[t - first + 1], q + kk, k + kk, v + vv, g[at * HV + h], beta[at * HV + h], fresh[at], 0);
                }
                for (int t = last - 1; t >= first; t--) {
                    const long at = (long)b * T + t, kk = (at * HK + h / (HV / HK)) * D, vv = (at * HV + h) * D;
                    const float *qt = q + kk, *kt = k + kk, *vt = v + vv, *got = go + vv;
                    const float a = fresh[at] ? 0.0f : expf(g[at * HV + h]), bt = beta[at * HV + h];
                    row *old = before[t - first], *new = before[t - first + 1];
                    float u[D] = {0}, dd[D] = {0}, du[D], error[D];
                    for (int i = 0; i < D; i++) {
                        const float ki = kt[i] * a;
                        for (int j = 0; j < D; j++)
                            u[j] += ki * old[i][j];
                    }
                    for (int j = 0; j < D; j++) {
                        error[j] = vt[j] - u[j];
                        u[j] = bt * error[j];
                    }
                    /* Sums along a row are kept as vectors as long as possible: adding up a vector costs more than a row. */
                    for (int i = 0; i < D; i++) {
                        const float qi = qt[i], ki = kt[i];
                        float sq = 0;
                        for (int j = 0; j < D; j++) {
                            ds[i][j] += qi * got[j];
                            sq += new[i][j] * got[j];
                            dd[j] += ki * ds[i][j];
                        }
                        dq[kk + i] += sq;
                    }
                    float sum = 0, decay = 0, decays[D] = {0};
                    for (int j = 0; j < D; j++) {
                        sum += dd[j] * error[j];
                        dv[vv + j] = bt * dd[j];
                        du[j] = -bt * dd[j];
                    }
                    dbeta[at * HV + h] = sum;
                    for (int i = 0; i < D; i++) {
                        const float ki = kt[i];
                        float sk = 0;
                        for (int j = 0; j < D; j++) {
                            const float scaled = a * old[i][j], grad = ds[i][j] + ki * du[j];
                            sk += scaled * du[j] + ds[i][j] * u[j];
                            decays[j] += grad * scaled;
                            ds[i][j] = a * grad;
                        }
                        dk[kk + i] += sk;
                    }
                    for (int j = 0; j < D; j++)
                        decay += decays[j];
                    dg[at * HV + h] = decay;
                }
            }
        }
}
