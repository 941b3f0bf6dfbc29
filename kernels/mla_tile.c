#include "kernels/mla_tile.h"

#include <math.h>
#include <string.h>

#include "kernels/mla_record.h"
#include "kernels/numeric.h"
#include "proto/layout.h"

_Static_assert((int)MLA_ROW == (int)MLA_RECORD_VALUES, "a row holds what a record gives");
_Static_assert(MLA_GROUP % 4 == 0, "scores are made four rows at a time");

typedef float lanes4 __attribute__((vector_size(16), may_alias));
#define TILE_LANES (uint32_t)(sizeof(TILE_VECTOR) / sizeof(float))

#define TILE_FN(name) name##_plain
#define TILE_TARGET
#define TILE_VECTOR lanes4
#include "kernels/mla_tile_body.inc"
#undef TILE_FN
#undef TILE_TARGET
#undef TILE_VECTOR

#if defined(__x86_64__)
typedef float lanes8 __attribute__((vector_size(32), may_alias));
typedef float lanes16 __attribute__((vector_size(64), may_alias));

#define TILE_FN(name) name##_avx2
#define TILE_TARGET   __attribute__((target("avx2")))
#define TILE_VECTOR   lanes8
#include "kernels/mla_tile_body.inc"
#undef TILE_FN
#undef TILE_TARGET
#undef TILE_VECTOR

#define TILE_FN(name) name##_avx512
#define TILE_TARGET   __attribute__((target("avx512f")))
#define TILE_VECTOR   lanes16
#include "kernels/mla_tile_body.inc"
#undef TILE_FN
#undef TILE_TARGET
#undef TILE_VECTOR
#endif

static const mla_tile_variant variants[] = {
#if defined(__x86_64__)
    {"avx512f", step_avx512},
    {"avx2", step_avx2},
#endif
    {"plain", step_plain},
};

size_t mla_tile_variants(const mla_tile_variant **ret)
{
    size_t first = 0;

#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx512f"))
        first = __builtin_cpu_supports("avx2") ? 1 : 2;
#endif
    *ret = &variants[first];
    return sizeof variants / sizeof variants[0] - first;
}
