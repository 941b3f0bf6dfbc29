#include "proto/layout.h"

#include <openssl/evp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "proto/given.h"
#include "proto/text.h"
#include "proto/wire.h"

/* The canonical description (PROTOCOL.md, "Namespaces"):
 *
 *   head 40 | model, zeros up to 8 | weights, zeros up to 8 | plane 48 | plane 48 | ... */
enum {
    CANON_MAGIC = 0x534e564b, /* "KVNS" */
    CANON_VERSION = 1,
    CANON_HEAD_BYTES = 40,
    CANON_PLANE_BYTES = 48,
    PAGE_ALIGN = 16,
};

static const char *const SHARD_NAMES[] = {"replicated", "heads", "layers"};

/* ---- checks ---- */

static kvs_status check_tag(const char *what, const char tag[KVS_TAG_BYTES], size_t least, kvs_err *err)
{
    size_t len = strnlen(tag, KVS_TAG_BYTES);

    if (len < least || len == KVS_TAG_BYTES)
        return kvs_fail(err, KVS_E_LIMIT, "%s: %s%zu bytes are outside %zu..%d", what,
                        len == KVS_TAG_BYTES ? "at least " : "", len, least, KVS_TAG_BYTES - 1);
    return text_check(what, (const uint8_t *)tag, len, err);
}

static kvs_status check_shard(const kvs_namespace *ns, kvs_err *err)
{
    if (ns->shard > KVS_SHARD_LAYERS)
        return kvs_fail(err, KVS_E_INVALID, "shard: kind %u is outside 0..%d", ns->shard, KVS_SHARD_LAYERS);
    if (ns->shard == KVS_SHARD_REPLICATED && (ns->shard_a | ns->shard_b | ns->shard_n) != 0)
        return kvs_fail(err, KVS_E_INVALID, "shard: replicated has [0,0)/0, not [%u,%u)/%u", ns->shard_a, ns->shard_b,
                        ns->shard_n);
    if (ns->shard != KVS_SHARD_REPLICATED && (ns->shard_a >= ns->shard_b || ns->shard_b > ns->shard_n))
        return kvs_fail(err, KVS_E_INVALID, "shard: %s [%u,%u)/%u is not a range with a < b <= n",
                        SHARD_NAMES[ns->shard], ns->shard_a, ns->shard_b, ns->shard_n);
    return KVS_OK;
}

static kvs_status check_plane_name(uint32_t index, const kvs_plane *p, kvs_err *err)
{
    size_t len = strnlen(p->name, sizeof p->name);

    if (len == 0 || len == sizeof p->name)
        return kvs_fail(err, KVS_E_LIMIT, "plane %u name: %s%zu bytes are outside 1..%d", index,
                        len == 0 ? "" : "at least ", len, KVS_PLANE_NAME_BYTES - 1);
    for (size_t i = 0; i < len; i++) {
        char c = p->name[i];

        if ((c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_')
            return kvs_fail(err, KVS_E_INVALID, "plane %u name: byte %zu (0x%02x) is outside [a-z0-9_]", index, i,
                            (unsigned char)c);
    }
    return KVS_OK;
}

static kvs_status check_plane(uint32_t index, const kvs_plane *p, uint32_t tokens, kvs_err *err)
{
    uint32_t fixed = kvs_format_row_bytes(p->format);
    uint64_t least = (uint64_t)tokens * p->row_bytes;
    kvs_status s = check_plane_name(index, p, err);

    if (s != KVS_OK)
        return s;
    if (kvs_format_name(p->format) == NULL)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "plane %u format: %u is not known", index, p->format);
    if (p->row_bytes == 0 || (fixed != 0 && p->row_bytes != fixed))
        return kvs_fail(err, KVS_E_INVALID, "plane %u row_bytes: %u where %s has %s%u", index, p->row_bytes,
                        kvs_format_name(p->format), fixed == 0 ? "at least " : "", fixed == 0 ? 1 : fixed);
    if (p->reserved != 0)
        return kvs_fail(err, KVS_E_INVALID, "plane %u reserved: %u is not 0", index, p->reserved);
    if (p->page_bytes >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_LIMIT, "plane %u page_bytes: %llu is not below %llu", index,
                        (unsigned long long)p->page_bytes, (unsigned long long)KVS_MAX_OFFSET);
    if (p->page_bytes % kvs_format_page_align(p->format) != 0)
        return kvs_fail(err, KVS_E_INVALID, "plane %u page_bytes: %llu is not a multiple of %u", index,
                        (unsigned long long)p->page_bytes, kvs_format_page_align(p->format));
    if (p->page_bytes < least)
        return kvs_fail(err, KVS_E_INVALID, "plane %u page_bytes: %llu is below %u tokens x %u bytes = %llu", index,
                        (unsigned long long)p->page_bytes, tokens, p->row_bytes, (unsigned long long)least);
    return KVS_OK;
}

static kvs_status check_counts(uint32_t tokens, uint32_t n_planes, kvs_err *err)
{
    if (tokens == 0 || tokens > KVS_MAX_TOKENS_PER_BLOCK)
        return kvs_fail(err, KVS_E_LIMIT, "tokens_per_block: %u is outside 1..%d", tokens, KVS_MAX_TOKENS_PER_BLOCK);
    if (n_planes == 0 || n_planes > KVS_MAX_PLANES)
        return kvs_fail(err, KVS_E_LIMIT, "n_planes: %u is outside 1..%d", n_planes, KVS_MAX_PLANES);
    return KVS_OK;
}

kvs_status kvs_namespace_check(const kvs_namespace *ns, kvs_err *err)
{
    uint64_t slot_bytes = 0; /* 1,024 pages below 2^40 each: no sum here leaves 64 bits */
    kvs_status s;

    if ((s = GIVEN(err, "namespace", {"ns", ns})) != KVS_OK || (s = check_tag("model", ns->model, 1, err)) != KVS_OK ||
        (s = check_tag("weights", ns->weights, 0, err)) != KVS_OK || (s = check_shard(ns, err)) != KVS_OK ||
        (s = check_counts(ns->tokens_per_block, ns->n_planes, err)) != KVS_OK)
        return s;
    if (ns->planes == NULL)
        return kvs_fail(err, KVS_E_INVALID, "planes: none given where n_planes is %u", ns->n_planes);
    for (uint32_t p = 0; p < ns->n_planes; p++) {
        s = check_plane(p, &ns->planes[p], ns->tokens_per_block, err);
        if (s != KVS_OK)
            return s;
        slot_bytes += ns->planes[p].page_bytes;
    }
    if (slot_bytes >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_LIMIT, "slot_bytes: %llu in %u planes is not below %llu",
                        (unsigned long long)slot_bytes, ns->n_planes, (unsigned long long)KVS_MAX_OFFSET);
    return KVS_OK;
}

/* ---- offsets ---- */

uint64_t kvs_namespace_slot_bytes(const kvs_namespace *ns)
{
    return kvs_namespace_plane_offset(ns, ns->n_planes);
}

uint64_t kvs_namespace_plane_offset(const kvs_namespace *ns, uint32_t p)
{
    uint64_t offset = 0;

    for (uint32_t i = 0; i < p && i < ns->n_planes; i++)
        offset += ns->planes[i].page_bytes;
    return offset;
}

/* ---- the canonical description ---- */

static size_t padded(size_t n)
{
    return (n + 7) / 8 * 8;
}

static size_t canon_bytes(const kvs_namespace *ns)
{
    return CANON_HEAD_BYTES + padded(strlen(ns->model)) + padded(strlen(ns->weights)) +
           (size_t)ns->n_planes * CANON_PLANE_BYTES;
}

static void put_plane(wire_out *o, const kvs_plane *p)
{
    char name[KVS_PLANE_NAME_BYTES] = {0};

    /* What stands behind the closing zero in the caller's field is not part of the name. */
    memcpy(name, p->name, strlen(p->name));
    wire_put_bytes(o, name, sizeof name);
    wire_put_u32(o, p->layer);
    wire_put_u32(o, p->format);
    wire_put_u32(o, p->row_bytes);
    wire_put_u32(o, 0);
    wire_put_u64(o, p->page_bytes);
}

static void put_head(wire_out *o, const kvs_namespace *ns)
{
    wire_put_u32(o, CANON_MAGIC);
    wire_put_u32(o, CANON_VERSION);
    wire_put_u32(o, ns->tokens_per_block);
    wire_put_u32(o, ns->n_planes);
    wire_put_u32(o, ns->shard);
    wire_put_u32(o, ns->shard_a);
    wire_put_u32(o, ns->shard_b);
    wire_put_u32(o, ns->shard_n);
    wire_put_u32(o, (uint32_t)strlen(ns->model));
    wire_put_u32(o, (uint32_t)strlen(ns->weights));
    wire_put_bytes(o, ns->model, strlen(ns->model));
    wire_put_pad8(o);
    wire_put_bytes(o, ns->weights, strlen(ns->weights));
    wire_put_pad8(o);
}

kvs_status kvs_namespace_encode(const kvs_namespace *ns, uint8_t *buf, size_t cap, size_t *ret_len, kvs_err *err)
{
    wire_out o = {.base = buf, .cap = cap};
    kvs_status s = GIVEN(err, "namespace_encode", {"buf", given_some(cap, buf)}, {"ret_len", ret_len});
    size_t need;

    if (s == KVS_OK)
        s = kvs_namespace_check(ns, err);
    if (s != KVS_OK)
        return s;
    need = canon_bytes(ns);
    *ret_len = need;
    if (need > cap)
        return kvs_fail(err, KVS_E_LIMIT, "canonical description: %zu bytes do not fit %zu", need, cap);
    put_head(&o, ns);
    for (uint32_t p = 0; p < ns->n_planes; p++)
        put_plane(&o, &ns->planes[p]);
    return KVS_OK;
}

static void get_tag(wire_in *i, char tag[KVS_TAG_BYTES], uint32_t len)
{
    const uint8_t *p = wire_get_array(i, len, 1);

    if (p != NULL && len < KVS_TAG_BYTES && memchr(p, 0, len) == NULL)
        memcpy(tag, p, len);
    else
        i->bad = true;
}

static void get_plane(wire_in *i, kvs_plane *p)
{
    size_t len;

    wire_get_bytes(i, p->name, sizeof p->name);
    p->layer = wire_get_u32(i);
    p->format = wire_get_u32(i);
    p->row_bytes = wire_get_u32(i);
    p->reserved = wire_get_u32(i);
    p->page_bytes = wire_get_u64(i);
    len = strnlen(p->name, sizeof p->name);
    for (size_t k = len; k < sizeof p->name; k++)
        if (p->name[k] != 0)
            i->bad = true; /* a second spelling of the same name */
}

/* The head and the tags.  ns->n_planes is what the bytes claim: checked by the caller before it is used. */
static kvs_status get_head(wire_in *i, kvs_namespace *ns, kvs_err *err)
{
    uint32_t magic = wire_get_u32(i), version = wire_get_u32(i), model_len, weights_len;

    if (i->bad || magic != CANON_MAGIC)
        return kvs_fail(err, KVS_E_PROTO, "canonical description: %zu bytes that do not start with \"KVNS\"", i->len);
    if (version != CANON_VERSION)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "canonical description: version %u is not %d", version, CANON_VERSION);
    ns->tokens_per_block = wire_get_u32(i);
    ns->n_planes = wire_get_u32(i);
    ns->shard = wire_get_u32(i);
    ns->shard_a = wire_get_u32(i);
    ns->shard_b = wire_get_u32(i);
    ns->shard_n = wire_get_u32(i);
    model_len = wire_get_u32(i);
    weights_len = wire_get_u32(i);
    if (model_len >= KVS_TAG_BYTES || weights_len >= KVS_TAG_BYTES)
        return kvs_fail(err, KVS_E_LIMIT, "canonical description: tags of %u and %u bytes, limit %d", model_len,
                        weights_len, KVS_TAG_BYTES - 1);
    get_tag(i, ns->model, model_len);
    get_tag(i, ns->weights, weights_len);
    if (i->bad)
        return kvs_fail(err, KVS_E_PROTO, "canonical description: tags are cut off or not spelled canonically");
    return KVS_OK;
}

kvs_status kvs_namespace_decode(const uint8_t *buf, size_t len, kvs_plane *planes, uint32_t cap_planes,
                                kvs_namespace *ret, kvs_err *err)
{
    wire_in i = {.base = buf, .len = len};
    kvs_namespace ns = {.planes = planes};
    kvs_status s = GIVEN(err, "namespace_decode", {"buf", given_some(len, buf)},
                         {"planes", given_some(cap_planes, planes)}, {"ret", ret});

    if (s != KVS_OK || (s = get_head(&i, &ns, err)) != KVS_OK ||
        (s = check_counts(ns.tokens_per_block, ns.n_planes, err)) != KVS_OK)
        return s;
    if (ns.n_planes > cap_planes)
        return kvs_fail(err, KVS_E_LIMIT, "n_planes: %u is above %u", ns.n_planes, cap_planes);
    if (len - i.pos != (size_t)ns.n_planes * CANON_PLANE_BYTES)
        return kvs_fail(err, KVS_E_PROTO, "canonical description: %zu bytes of planes where %u planes take %zu",
                        len - i.pos, ns.n_planes, (size_t)ns.n_planes * CANON_PLANE_BYTES);
    for (uint32_t p = 0; p < ns.n_planes; p++)
        get_plane(&i, &planes[p]);
    if (!wire_in_done(&i))
        return kvs_fail(err, KVS_E_PROTO, "canonical description: a plane name is not padded with zeros");
    s = kvs_namespace_check(&ns, err);
    if (s == KVS_OK)
        *ret = ns;
    return s;
}

/* ---- digests ---- */

kvs_status kvs_namespace_digest(const kvs_namespace *ns, uint8_t ret[KVS_DIGEST_BYTES], kvs_err *err)
{
    kvs_status s = GIVEN(err, "namespace_digest", {"ret", ret});
    size_t len;
    uint8_t *buf;

    if (s == KVS_OK)
        s = kvs_namespace_check(ns, err);
    if (s != KVS_OK)
        return s;
    len = canon_bytes(ns);
    buf = malloc(len);
    if (buf == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "canonical description: no %zu bytes left", len);
    s = kvs_namespace_encode(ns, buf, len, &len, err);
    if (s == KVS_OK && EVP_Digest(buf, len, ret, NULL, EVP_sha256(), NULL) != 1)
        s = kvs_fail(err, KVS_E_SYS, "SHA-256 of %zu bytes failed", len);
    free(buf);
    return s;
}

/* One byte too many is kept, so that the check finds the tag too long rather than cut. */
static void set_tag(char to[KVS_TAG_BYTES], const char *from)
{
    if (from != NULL)
        memcpy(to, from, strnlen(from, KVS_TAG_BYTES));
}

static bool is_mla(uint32_t format)
{
    return (format >= KVS_FORMAT_mla_bf16 && format <= KVS_FORMAT_fp8_ds_mla) ||
           (format >= KVS_FORMAT_mla_fp32 && format <= KVS_FORMAT_fp8_blk528);
}

kvs_status kvs_namespace_mla(const char *model, const char *weights, uint32_t format, uint32_t n_layers,
                             uint32_t tokens_per_block, kvs_plane *planes, kvs_namespace *ret, kvs_err *err)
{
    kvs_namespace ns = {.tokens_per_block = tokens_per_block, .n_planes = n_layers, .planes = planes};
    uint32_t row = kvs_format_row_bytes(format), align = kvs_format_page_align(format);
    kvs_status s = GIVEN(err, "namespace_mla", {"planes", given_some(n_layers, planes)}, {"ret", ret});

    if (s == KVS_OK)
        s = check_counts(tokens_per_block, n_layers, err);
    if (s != KVS_OK)
        return s;
    if (!is_mla(format))
        return kvs_fail(err, KVS_E_UNSUPPORTED, "format: %u is not one of MLA", format);
    set_tag(ns.model, model);
    set_tag(ns.weights, weights);
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        planes[layer] = (kvs_plane){.name = "latent", .layer = layer, .format = format, .row_bytes = row};
        planes[layer].page_bytes = ((uint64_t)tokens_per_block * row + align - 1) / align * align;
    }
    s = kvs_namespace_check(&ns, err);
    if (s == KVS_OK)
        *ret = ns;
    return s;
}

/* One field of a key: its tag, its length, its bytes.  So no two lists of fields give the same stream. */
static bool add_field(EVP_MD_CTX *c, uint8_t tag, const void *p, uint64_t len)
{
    uint8_t head[9];
    wire_out o = {.base = head, .cap = sizeof head};

    wire_put_u8(&o, tag);
    wire_put_u64(&o, len);
    return EVP_DigestUpdate(c, head, sizeof head) == 1 && (len == 0 || EVP_DigestUpdate(c, p, (size_t)len) == 1);
}

static bool add_tokens(EVP_MD_CTX *c, const uint32_t *tokens, uint32_t n)
{
    uint8_t buf[KVS_MAX_TOKENS_PER_BLOCK * 4];
    wire_out o = {.base = buf, .cap = sizeof buf};

    for (uint32_t i = 0; i < n; i++)
        wire_put_u32(&o, tokens[i]);
    return add_field(c, 'T', buf, o.len);
}

kvs_status kvs_key_derive(const uint8_t parent[32], const char *salt, const char *adapter, const uint32_t *tokens,
                          uint32_t n_tokens, uint8_t ret[32], kvs_err *err)
{
    static const char domain[] = "kvstride-key-1";
    kvs_status s = GIVEN(err, "key_derive", {"parent", parent}, {"tokens", given_some(n_tokens, tokens)}, {"ret", ret});
    EVP_MD_CTX *c;
    bool done;

    if (s != KVS_OK)
        return s;
    if (n_tokens == 0 || n_tokens > KVS_MAX_TOKENS_PER_BLOCK)
        return kvs_fail(err, KVS_E_LIMIT, "n_tokens: %u is outside 1..%d", n_tokens, KVS_MAX_TOKENS_PER_BLOCK);
    c = EVP_MD_CTX_new();
    if (c == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "key: no memory for SHA-256");
    done = EVP_DigestInit_ex(c, EVP_sha256(), NULL) == 1 && add_field(c, 'V', domain, sizeof domain - 1) &&
           add_field(c, 'P', parent, 32) && add_field(c, 'S', salt, salt == NULL ? 0 : strlen(salt)) &&
           add_field(c, 'A', adapter, adapter == NULL ? 0 : strlen(adapter)) && add_tokens(c, tokens, n_tokens) &&
           EVP_DigestFinal_ex(c, ret, NULL) == 1;
    EVP_MD_CTX_free(c);
    return done ? KVS_OK : kvs_fail(err, KVS_E_SYS, "key: SHA-256 failed");
}
