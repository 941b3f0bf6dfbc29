#include "daemon/table.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    GRAIN = 64, /* a text begins at a multiple of it */
    NS_AT = 4096,
    LAYOUTS_AT = NS_AT + TABLE_MAX_NS * 8,
    EXTENTS_AT = 64 << 10,
    TEXTS_AT = EXTENTS_AT + TABLE_MAX_EXTENTS * 8,
    ROWS_AT = TEXTS_AT + TABLE_TEXTS_BYTES,
    PAGE = 4096,
};
#define MAGIC  UINT64_C(0x656c62617473766b) /* "kvstable" */
#define ULL(n) ((unsigned long long)(n))

typedef struct layout_record {
    uint8_t digest[32];
    uint64_t slot_bytes, check, reserved[2];
} layout_record;
_Static_assert(sizeof(layout_record) == 64, "of the file");
_Static_assert(sizeof(table_head) == 64, "of the file");
_Static_assert(LAYOUTS_AT + TABLE_MAX_LAYOUTS * (int)sizeof(layout_record) <= EXTENTS_AT, "parts do not overlap");

typedef struct text_head {
    uint64_t check; /* of all behind it, with the number as seed */
    uint32_t tenant_len, canon_len;
    uint8_t digest[32];
    uint8_t bytes[]; /* tenant, canonical description */
} text_head;

/* ---- stores ---- */

/* Words of `n` bytes, the last one filled up with zeros. */
static void store_bytes(const slot_table *t, uint8_t *at, const void *from, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        uint64_t w = 0;

        memcpy(&w, (const uint8_t *)from + i, n - i < 8 ? n - i : 8);
        table_store(t, at + i, w);
    }
}

/* ---- heads ---- */

static uint64_t head_check(const table_head *h)
{
    return XXH3_64bits(h, offsetof(table_head, check)) | 1; /* never 0, which is void */
}

static void read_head(const uint8_t *front, uint32_t i, table_head *ret)
{
    memcpy(ret, front + i * sizeof *ret, sizeof *ret);
}

/* The newer good one of two; false and why. */
static bool find_head(const uint8_t *front, table_head *ret, uint32_t *ret_at, char why[KVS_ERR_MSG_BYTES])
{
    bool found = false;
    table_head h;

    (void)snprintf(why, KVS_ERR_MSG_BYTES, "magic: found 0, wanted 0x%llx", ULL(MAGIC));
    for (uint32_t i = 0; i < 2; i++) {
        read_head(front, i, &h);
        if (h.magic != MAGIC) {
            if (h.magic != 0 && !found)
                (void)snprintf(why, KVS_ERR_MSG_BYTES, "magic: found 0x%llx, wanted 0x%llx", ULL(h.magic), ULL(MAGIC));
        } else if (h.version != TABLE_VERSION) { /* its sum may be made in another way */
            (void)snprintf(why, KVS_ERR_MSG_BYTES, "version: found %lu, wanted %d", (unsigned long)h.version,
                           TABLE_VERSION);
        } else if (h.check != head_check(&h)) {
            if (h.check != 0)
                (void)snprintf(why, KVS_ERR_MSG_BYTES, "checksum of the head: found 0x%llx, wanted 0x%llx",
                               ULL(h.check), ULL(head_check(&h)));
        } else if (!found || h.seq > ret->seq) {
            found = true;
            *ret = h;
            *ret_at = i;
        }
    }
    return found;
}

static void write_head(slot_table *t, const table_geometry *g, const table_head *before, uint32_t at)
{
    table_head *h = (table_head *)(void *)t->front + at;

    t->head = (table_head){.magic = MAGIC,
                           .version = TABLE_VERSION,
                           .row_bytes = g->row_bytes,
                           .extent_bytes = g->extent_bytes,
                           .n_extents = g->n_extents,
                           .max_slots = g->max_slots,
                           .boots = before->boots + 1,
                           .seq = before->seq + 1};
    t->head.check = head_check(&t->head);
    table_store(t, &h->check, 0);
    store_bytes(t, (uint8_t *)h, &t->head, offsetof(table_head, check));
    table_store(t, &h->check, t->head.check);
}

static table_geometry geometry_of(const table_head *h)
{
    return (table_geometry){.extent_bytes = h->extent_bytes,
                            .n_extents = h->n_extents,
                            .max_slots = h->max_slots,
                            .row_bytes = h->row_bytes};
}

static bool head_makes_sense(const table_head *h, const persist *m, char why[KVS_ERR_MSG_BYTES])
{
    table_geometry g = geometry_of(h);
    uint64_t arena = persist_arena_bytes(m), file = persist_table_bytes(m), rows = h->extent_bytes / 1024;

    g.rows_per_extent = (uint32_t)rows;
    if (h->n_extents == 0 || h->n_extents > TABLE_MAX_EXTENTS || h->extent_bytes < PAGE ||
        h->extent_bytes % PAGE != 0 || h->extent_bytes > UINT64_C(1) << 42 || h->row_bytes == 0 ||
        h->row_bytes > PAGE || rows * h->n_extents >= TABLE_NONE) /* the numbers of rows are below that */
        (void)snprintf(why, KVS_ERR_MSG_BYTES, "geometry: %lu extents of %llu bytes, rows of %lu bytes",
                       (unsigned long)h->n_extents, ULL(h->extent_bytes), (unsigned long)h->row_bytes);
    else if (arena < h->extent_bytes * h->n_extents)
        (void)snprintf(why, KVS_ERR_MSG_BYTES, "arena bytes: found %llu, wanted %llu", ULL(arena),
                       ULL(h->extent_bytes * h->n_extents));
    else if (file < table_bytes(&g))
        (void)snprintf(why, KVS_ERR_MSG_BYTES, "table bytes: found %llu, wanted %llu", ULL(file), ULL(table_bytes(&g)));
    else
        return true;
    return false;
}

bool table_peek(const persist *m, table_geometry *ret, char why[KVS_ERR_MSG_BYTES])
{
    uint8_t front[2 * sizeof(table_head)];
    table_head h;
    uint32_t at;

    why[0] = '\0';
    if (!m->survived)
        return false; /* it is new: nothing to explain */
    if (pread(m->table_fd, front, sizeof front, 0) != (ssize_t)sizeof front) {
        (void)snprintf(why, KVS_ERR_MSG_BYTES, "table bytes: found %llu, wanted %llu", ULL(persist_table_bytes(m)),
                       ULL(ROWS_AT));
        return false;
    }
    if (!find_head(front, &h, &at, why) || !head_makes_sense(&h, m, why))
        return false;
    why[0] = '\0';
    *ret = geometry_of(&h);
    ret->rows_per_extent = (uint32_t)(h.extent_bytes / 1024);
    return true;
}

uint64_t table_bytes(const table_geometry *g)
{
    uint64_t rows = (uint64_t)g->n_extents * g->rows_per_extent * g->row_bytes;

    return ROWS_AT + ((rows + PAGE - 1) & ~(uint64_t)(PAGE - 1));
}

uint64_t table_rows_offset(void)
{
    return ROWS_AT;
}

/* ---- open and close ---- */

kvs_status table_open(slot_table *t, persist *m, const table_geometry *g, bool keep, kvs_err *err)
{
    char why[KVS_ERR_MSG_BYTES];
    table_head before = {0};
    uint32_t at = 1;
    kvs_status s;
    void *front;

    t->memory = m;
    s = persist_reserve(m, 0, EXTENTS_AT + ((uint64_t)g->n_extents * 8 + PAGE - 1) / PAGE * PAGE, err);
    if (s != KVS_OK)
        return s;
    front = mmap(NULL, ROWS_AT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m->table_fd, 0);
    if (front == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, PERSIST_TABLE ": cannot map %d bytes: %s", ROWS_AT, strerror(errno));
    (void)madvise(front, ROWS_AT, MADV_NOHUGEPAGE); /* a few records are not worth 2 MiB */
    (void)madvise(front, ROWS_AT, MADV_DONTDUMP);   /* namespaces are users', and it is longer than a core should be */
    s = sparse_init_at(&t->rows, m->table_fd, ROWS_AT, (uint64_t)g->n_extents * g->rows_per_extent, g->row_bytes, err);
    if (s != KVS_OK) {
        (void)munmap(front, ROWS_AT);
        return s;
    }
    t->front = front;
    if (keep) {
        (void)find_head(t->front, &before, &at, why);
        table_trim(t);
    }
    write_head(t, g, &before, at ^ 1);
    return KVS_OK;
}

void table_close(slot_table *t)
{
    sparse_fini(&t->rows);
    if (t->front != NULL)
        (void)munmap(t->front, ROWS_AT);
    t->front = NULL;
}

/* ---- layouts ---- */

static uint64_t layout_check(uint32_t i, const uint8_t digest[32], uint64_t slot_bytes)
{
    return XXH3_64bits_withSeed(digest, 32, slot_bytes ^ (uint64_t)i << 48) | 1;
}

static layout_record *layout_at(const slot_table *t, uint32_t i)
{
    return (layout_record *)(void *)(t->front + LAYOUTS_AT) + i;
}

void table_put_layout(slot_table *t, uint32_t i, const uint8_t digest[32], uint64_t slot_bytes)
{
    layout_record *r = layout_at(t, i);

    table_store(t, &r->check, 0);
    store_bytes(t, r->digest, digest, 32);
    table_store(t, &r->slot_bytes, slot_bytes);
    table_store(t, &r->check, layout_check(i, digest, slot_bytes));
}

enum table_found table_get_layout(const slot_table *t, uint32_t i, uint8_t ret_digest[32], uint64_t *ret_slot_bytes)
{
    const layout_record *r = layout_at(t, i);

    if (r->check == 0)
        return TABLE_VOID;
    if (r->check != layout_check(i, r->digest, r->slot_bytes))
        return TABLE_BAD;
    memcpy(ret_digest, r->digest, 32);
    *ret_slot_bytes = r->slot_bytes;
    return TABLE_GOOD;
}

/* ---- bindings: layout + 1 in bits 0..15, slots in 16..47, a sum of both and the extent's number above ---- */

static uint64_t binding(uint32_t extent, uint32_t layout, uint32_t n_slots)
{
    uint64_t v = (uint64_t)n_slots << 16 | (layout + 1);

    return v | XXH3_64bits_withSeed(&v, sizeof v, extent) << 48;
}

static uint64_t *binding_at(const slot_table *t, uint32_t extent)
{
    return (uint64_t *)(void *)(t->front + EXTENTS_AT) + extent;
}

void table_put_extent(slot_table *t, uint32_t extent, uint32_t layout, uint32_t n_slots)
{
    table_store(t, binding_at(t, extent), layout == TABLE_NONE ? 0 : binding(extent, layout, n_slots));
}

enum table_found table_get_extent(const slot_table *t, uint32_t extent, uint32_t *ret_layout, uint32_t *ret_n_slots)
{
    uint64_t v = *binding_at(t, extent);
    uint32_t layout = (uint32_t)(v & 0xffff) - 1, n = (uint32_t)(v >> 16);

    if (v == 0)
        return TABLE_VOID;
    if (layout >= TABLE_MAX_LAYOUTS || v != binding(extent, layout, n))
        return TABLE_BAD;
    *ret_layout = layout;
    *ret_n_slots = n;
    return TABLE_GOOD;
}

/* ---- namespaces: an index entry is the text's first grain in its low half, its bytes in the high one ---- */

static uint64_t *index_at(const slot_table *t, uint32_t number)
{
    return (uint64_t *)(void *)(t->front + NS_AT) + number;
}

static uint64_t text_check(const text_head *h, size_t len, uint32_t number)
{
    return XXH3_64bits_withSeed((const uint8_t *)h + sizeof h->check, len - sizeof h->check, number);
}

static uint32_t grains(uint64_t bytes)
{
    return (uint32_t)((bytes + GRAIN - 1) / GRAIN);
}

static void write_text(const slot_table *t, uint32_t grain, uint32_t number, const table_ns *ns, size_t tenant_len)
{
    const uint64_t len = sizeof(text_head) + tenant_len + ns->canon_len;
    uint8_t *at = t->front + TEXTS_AT + (uint64_t)grain * GRAIN;
    text_head head = {.tenant_len = (uint32_t)tenant_len, .canon_len = (uint32_t)ns->canon_len};
    uint8_t both[TABLE_TENANT_BYTES + 8];
    size_t n = (tenant_len + 7) & ~(size_t)7, shared = n - tenant_len;

    memcpy(head.digest, ns->digest, sizeof head.digest);
    if (shared > ns->canon_len)
        shared = ns->canon_len;
    memcpy(both, ns->tenant, tenant_len); /* the word in which one ends and the other begins */
    memcpy(both + tenant_len, ns->canon, shared);
    store_bytes(t, at + sizeof head.check, (const uint8_t *)&head + sizeof head.check, sizeof head - sizeof head.check);
    store_bytes(t, at + sizeof head, both, tenant_len + shared);
    store_bytes(t, at + sizeof head + n, ns->canon + shared, ns->canon_len - shared);
    table_store(t, at, text_check((const text_head *)(const void *)at, len, number));
}

uint64_t table_ns_bytes(size_t canon_len)
{
    return (uint64_t)grains(sizeof(text_head) + TABLE_TENANT_BYTES + canon_len) * GRAIN;
}

/* Grains that texts take: where each begins, and where it ends. */
typedef struct span {
    uint32_t from, to;
} span;

static int compare_spans(const void *a, const void *b)
{
    const uint32_t x = ((const span *)a)->from, y = ((const span *)b)->from;

    return (x > y) - (x < y);
}

/* Room for n grains between the texts that are in use. */
static bool find_gap(const slot_table *t, uint32_t n, uint32_t *ret)
{
    span used[TABLE_MAX_NS];
    uint32_t n_used = 0, at = 0;

    for (uint32_t i = 0; i < TABLE_MAX_NS; i++) {
        uint64_t v = *index_at(t, i), from = v & 0xffffffff, end = from + grains(v >> 32);

        if (v != 0 && end <= TABLE_TEXTS_BYTES / GRAIN)
            used[n_used++] = (span){(uint32_t)from, (uint32_t)end};
    }
    qsort(used, n_used, sizeof used[0], compare_spans);
    for (uint32_t i = 0; i < n_used && (used[i].from < at || used[i].from - at < n); i++)
        at = used[i].to > at ? used[i].to : at;
    *ret = at;
    return n <= TABLE_TEXTS_BYTES / GRAIN - at;
}

kvs_status table_put_ns(slot_table *t, uint32_t number, const table_ns *ns, kvs_err *err)
{
    size_t tenant_len = strlen(ns->tenant);
    uint64_t len = sizeof(text_head) + tenant_len + ns->canon_len;
    uint32_t at = t->text_end;
    kvs_status s;

    if (len > TABLE_TEXTS_BYTES || ((uint64_t)at * GRAIN > TABLE_TEXTS_BYTES - len && !find_gap(t, grains(len), &at)))
        return kvs_fail(err, KVS_E_LIMIT, "namespaces: %llu bytes of descriptions are kept, %llu more make over %d",
                        ULL(t->text_end) * GRAIN, ULL(len), TABLE_TEXTS_BYTES);
    s = persist_reserve(t->memory, TEXTS_AT + (uint64_t)at * GRAIN, len, err);
    if (s != KVS_OK)
        return s;
    write_text(t, at, number, ns, tenant_len);
    table_store(t, index_at(t, number), len << 32 | at);
    if (at + grains(len) > t->text_end)
        t->text_end = at + grains(len);
    return KVS_OK;
}

enum table_found table_get_ns(const slot_table *t, uint32_t number, table_ns *ret)
{
    uint64_t v = *index_at(t, number), grain = v & 0xffffffff, len = v >> 32;
    const text_head *h = (const text_head *)(const void *)(t->front + TEXTS_AT + grain * GRAIN);

    if (v == 0)
        return TABLE_VOID;
    if (grain * GRAIN > TABLE_TEXTS_BYTES || len > TABLE_TEXTS_BYTES - grain * GRAIN || len < sizeof *h ||
        h->tenant_len >= TABLE_TENANT_BYTES || len != sizeof *h + (uint64_t)h->tenant_len + h->canon_len ||
        h->check != text_check(h, len, number))
        return TABLE_BAD;
    memset(ret, 0, sizeof *ret);
    memcpy(ret->tenant, h->bytes, h->tenant_len);
    memcpy(ret->digest, h->digest, sizeof ret->digest);
    ret->canon = h->bytes + h->tenant_len;
    ret->canon_len = h->canon_len;
    return TABLE_GOOD;
}

void table_drop_ns(slot_table *t, uint32_t number)
{
    if (*index_at(t, number) != 0)
        table_store(t, index_at(t, number), 0);
}

void table_trim(slot_table *t)
{
    t->text_end = 0;
    for (uint32_t i = 0; i < TABLE_MAX_NS; i++) {
        uint64_t v = *index_at(t, i), end = (v & 0xffffffff) + grains(v >> 32);

        if (v != 0 && end > t->text_end && end <= TABLE_TEXTS_BYTES / GRAIN)
            t->text_end = (uint32_t)end;
    }
}
