#include <math.h>
#include <string.h>

#include "kernels/mla.h"
#include "kernels/numeric.h"

/* An infinite LSE of either sign stands for a state without tokens; its vector is not read, so that whatever
 * lies there cannot reach the result. */
static int is_empty(float lse)
{
    return isinf(lse);
}

void kvs_merge_states(float *dst, float *dst_lse, const float *src, float src_lse, uint32_t n)
{
    float m, a, b, wa, wb;

    if (is_empty(*dst_lse) && is_empty(src_lse)) {
        memset(dst, 0, (size_t)n * sizeof *dst);
        *dst_lse = -INFINITY;
        return;
    }
    if (is_empty(src_lse))
        return;
    if (is_empty(*dst_lse)) {
        memmove(dst, src, (size_t)n * sizeof *dst);
        *dst_lse = src_lse;
        return;
    }
    m = *dst_lse > src_lse ? *dst_lse : src_lse;
    a = kvs_exp_nonpos(*dst_lse - m);
    b = kvs_exp_nonpos(src_lse - m);
    wa = a / (a + b);
    wb = b / (a + b);
    for (uint32_t i = 0; i < n; i++)
        dst[i] = dst[i] * wa + src[i] * wb;
    *dst_lse = m + (float)log((double)(a + b));
}
