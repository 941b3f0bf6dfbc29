#include "proto/backend.h"

#include <inttypes.h>
#include <string.h>

static const struct {
    const char *name;
    kvs_stride_order order;
} BACKENDS[] = {
#define X(name, number, order) [number] = {#name, KVS_ORDER_##order},
    KVS_BACKEND_MAP(X)
#undef X
};
enum { N_BACKENDS = sizeof BACKENDS / sizeof *BACKENDS }; /* number 0 is none and stays empty */

const char *kvs_backend_name(uint32_t backend)
{
    return backend < N_BACKENDS ? BACKENDS[backend].name : NULL;
}

uint32_t kvs_backend_parse(const char *name)
{
    for (uint32_t i = 1; name != NULL && i < N_BACKENDS; i++)
        if (strcmp(name, BACKENDS[i].name) == 0)
            return i;
    return KVS_BACKEND_OTHER;
}

kvs_stride_order kvs_backend_order(uint32_t backend)
{
    return kvs_backend_name(backend) != NULL ? BACKENDS[backend].order : KVS_ORDER_LAYERS_FIRST;
}

uint32_t kvs_backend_stride_order(uint32_t backend, bool with_layers, uint32_t ret[4])
{
    const bool blocks_first = with_layers && kvs_backend_order(backend) == KVS_ORDER_BLOCKS_FIRST;
    const uint32_t n = with_layers ? 4 : 3;

    for (uint32_t i = 0; i < n; i++)
        ret[i] = blocks_first && i < 2 ? 1 - i : i;
    return n;
}

/* The plane of a map that forbids blocks first: the map's own, or the first of whole blocks that its owner is not for. */
static const kvs_plane *forbidden(uint32_t backend, const kvs_namespace *ns, uint32_t plane)
{
    const uint32_t first = plane < ns->n_planes ? plane : 0, end = plane < ns->n_planes ? plane + 1 : ns->n_planes;

    for (uint32_t i = first; i < end; i++) {
        const uint32_t owner =
            ns->planes[i].format == KVS_FORMAT_indexer_fp8 ? KVS_BACKEND_DEEPSEEK_V32_INDEXER : backend;

        if (kvs_backend_order(owner) != KVS_ORDER_BLOCKS_FIRST)
            return &ns->planes[i];
    }
    return NULL;
}

kvs_status kvs_backend_check(uint32_t owner, const kvs_namespace *ns, uint32_t plane, uint32_t n_slots, uint64_t stride,
                             kvs_err *err)
{
    const uint32_t backend = owner & ~KVS_BACKEND_OVERRIDE;
    const bool whole = plane >= ns->n_planes;
    const kvs_plane *p;

    if (backend == KVS_BACKEND_UNSAID && owner == 0)
        return KVS_OK;
    if (kvs_backend_name(backend) == NULL)
        return kvs_fail(err, KVS_E_INVALID, "backend: %" PRIu32 " is outside 1..%d", backend, N_BACKENDS - 1);
    if ((owner & KVS_BACKEND_OVERRIDE) != 0 || n_slots <= 1)
        return KVS_OK;
    if ((!whole || ns->n_planes == 1) && stride == ns->planes[whole ? 0 : plane].page_bytes)
        return KVS_OK;
    p = forbidden(backend, ns, plane);
    if (p == NULL)
        return KVS_OK;
    return kvs_fail(err, KVS_E_UNSUPPORTED,
                    "backend %s: plane %s of layer %" PRIu32 ": stride %" PRIu64 ", page %" PRIu64
                    ": not verified across layers; one tensor a layer, or override",
                    kvs_backend_name(p->format == KVS_FORMAT_indexer_fp8 ? KVS_BACKEND_DEEPSEEK_V32_INDEXER : backend),
                    p->name, p->layer, stride, p->page_bytes);
}
