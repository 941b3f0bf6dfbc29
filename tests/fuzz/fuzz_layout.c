#include "proto/layout.h"

#include <stdlib.h>
#include <string.h>

/* A description that is accepted must encode to the very same bytes, and its offsets must add up. */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static kvs_plane planes[KVS_MAX_PLANES];
    static uint8_t again[65536];
    uint8_t digest[KVS_DIGEST_BYTES];
    kvs_namespace ns;
    kvs_err err = {0};
    size_t len = 0;

    if (kvs_namespace_decode(data, size, planes, KVS_MAX_PLANES, &ns, &err) != KVS_OK) {
        if (err.status == KVS_OK || err.msg[0] == 0)
            abort();
        return 0;
    }
    if (kvs_namespace_encode(&ns, again, sizeof again, &len, NULL) != KVS_OK || len != size ||
        memcmp(again, data, size) != 0)
        abort();
    if (kvs_namespace_slot_bytes(&ns) >= KVS_MAX_OFFSET || kvs_namespace_slot_bytes(&ns) % 16 != 0)
        abort();
    if (kvs_namespace_digest(&ns, digest, NULL) != KVS_OK)
        abort();
    return 0;
}
