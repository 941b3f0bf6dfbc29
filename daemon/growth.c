/* Growth: the pool's arena gets its memory piece by piece in the background, and another size by a reload. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>

#include "config/option.h"
#include "daemon/core.h"
#include "daemon/log.h"
#include "kernels/host_node.h"
#include "kernels/host_pages.h"

/* One registration is good for all devices. */
device *core_host(const core *c)
{
    return c->devices[0].dev;
}

/* The pages of an unregistered piece. */
static void give_back(const core *c, const core_piece *piece)
{
    /* The first piece is the start of the arena, and is never dropped. */
    const uint8_t *base = c->n_pieces > 0 ? c->pieces[0].address : piece->address;

    (void)fallocate(pool_arena_fd(c->pool), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    (uint8_t *)piece->address - base, (off_t)piece->bytes);
}

static kvs_status make_piece(const core *c, const core_piece *piece, kvs_err *err)
{
    device *dev = core_host(c);
    kvs_status s = kvs_host_node_place(piece->address, piece->bytes, c->numa_node, err);

    if (!c->node_is_asked_for) /* a container that forbids it is no fault */
        s = KVS_OK;
    if (s == KVS_OK)
        s = persist_room(c->memory, kvs_pages_absent(piece->address, piece->bytes), err);
    return s == KVS_OK ? dev->ops->host_register(dev, piece->address, piece->bytes, err) : s;
}

/* What was made before it failed would fill a tmpfs, or the memory that others need, for nothing. */
static void grow_run(pinner_task *t)
{
    core *c = (core *)(void *)((uint8_t *)t - offsetof(core, grow));

    c->grow_err.status = make_piece(c, &c->growing, &c->grow_err);
    if (c->grow_err.status != KVS_OK && c->grow_err.status != KVS_E_DEVICE_LOST && c->growing_is_new)
        give_back(c, &c->growing);
}

static void grow_failed(core *c)
{
    core_note_status(c, c->grow_err.status);
    if (c->grow_err.status == KVS_E_NO_SPACE) /* the device sees that pages are missing, not why */
        (void)persist_room(c->memory, c->growing.bytes, &c->grow_err);
    c->grow_failed = true;
    pool_piece_failed(c->pool);
    log_event(LOG_LEVEL_ERROR, "arena_piece_failed", " bytes=%" PRIu64 " piece=%u reason=\"%s\"", c->growing.bytes,
              c->n_pieces, c->grow_err.msg);
}

static kvs_status add_piece(core *c, kvs_err *err)
{
    core_piece *pieces = realloc(c->pieces, (c->n_pieces + 1) * sizeof(*pieces));

    if (!pieces) {
        core_host(c)->ops->host_unregister(core_host(c), c->growing.address, c->growing.bytes);
        return kvs_fail(err, KVS_E_NO_MEMORY, "list of pieces: out of memory");
    }
    c->pieces = pieces;
    c->pieces[c->n_pieces++] = c->growing;
    pool_piece_usable(c->pool);
    return KVS_OK;
}

static void grow_done(work *w)
{
    core *c = (core *)(void *)((uint8_t *)w - offsetof(core, grow));

    c->is_growing = false;
    if (c->grow_err.status == KVS_OK)
        (void)add_piece(c, &c->grow_err);
    if (c->grow_err.status != KVS_OK) {
        grow_failed(c);
        if (c->resize_due)
            core_grow_again(c); /* it was of the size before */
    }
    core_resize(c);
    core_grow(c);
}

void core_grow(core *c)
{
    if (c->stopped || c->is_growing || c->is_dropping || c->grow_failed ||
        !pool_next_piece(c->pool, &c->growing.address, &c->growing.bytes))
        return;
    c->is_growing = true;
    c->growing_is_new = pool_piece_is_new(c->pool);
    c->grow_err = (kvs_err){0};
    c->grow.run = grow_run;
    c->grow.work.on_done = grow_done;
    pinner_submit(c->pinner, &c->grow, false);
}

/* ---- another size ---- */

static void drop_run(pinner_task *t)
{
    core *c = (core *)(void *)((uint8_t *)t - offsetof(core, drop));

    core_host(c)->ops->host_unregister(core_host(c), c->dropping.address, c->dropping.bytes);
    give_back(c, &c->dropping);
}

static void drop_done(work *w)
{
    core *c = (core *)(void *)((uint8_t *)w - offsetof(core, drop));

    c->is_dropping = false;
    log_event(LOG_LEVEL_INFO, "arena_piece_dropped", " bytes=%" PRIu64 " pieces=%u", c->dropping.bytes, c->n_pieces);
    core_resize(c);
    core_grow(c);
}

/* Give back the last piece, once nothing of it is in use. */
static void drop_next(core *c)
{
    pool_bytes b;

    if (c->n_pieces < 2)
        return;
    pool_get_bytes(c->pool, &b);
    c->dropping = c->pieces[c->n_pieces - 1];
    if (!pool_drop_piece(c->pool, c->dropping.bytes, &c->dropping.address)) {
        c->shrinks = b.giving_up > 0;
        return;
    }
    c->n_pieces--;
    c->is_dropping = true;
    c->drop.run = drop_run;
    c->drop.work.on_done = drop_done;
    pinner_submit(c->pinner, &c->drop, false);
}

/* The operator may have made room. */
void core_grow_again(core *c)
{
    if (!c->grow_failed || c->n_pieces == 0) /* without a first piece the process is about to end */
        return;
    c->grow_failed = false;
    pool_piece_again(c->pool);
}

void core_resize(core *c)
{
    kvs_err err;

    if (c->is_growing || c->is_dropping || c->stopped)
        return; /* what ends then comes here again */
    if (c->resize_due) {
        c->resize_due = false;
        if (pool_resize(c->pool, (uint64_t)c->config->pool_max_bytes, &err) != KVS_OK) {
            log_event(LOG_LEVEL_ERROR, "pool_not_resized", " reason=\"%s\"", err.msg); /* see core_check_config */
            return;
        }
        directory_resized(c->dir);
        c->shrinks = c->step_due = true;
    }
    if (c->shrinks)
        drop_next(c);
}

/* Smaller, it must leave the tenants what they were promised. */
static kvs_status check_floors(const core *c, const config *next, kvs_err *err)
{
    const char *names[CONFIG_MAX_TENANTS];
    uint64_t floors[CONFIG_MAX_TENANTS];

    for (uint32_t t = 0; t < next->n_tenants; t++) {
        names[t] = next->tenants[t].name;
        floors[t] = (uint64_t)next->tenants[t].floor_bytes;
    }
    return directory_check_size(c->dir, (uint64_t)next->pool_max_bytes, names, floors, err);
}

kvs_status core_check_config(const core *c, const config *next, kvs_err *err)
{
    const uint64_t most = pool_reserved(c->pool), least = pool_extent_bytes(c->pool);
    const uint64_t want = (uint64_t)next->pool_max_bytes;
    char text[3][OPTION_TEXT_BYTES];

    if (want == (uint64_t)c->config->pool_max_bytes)
        return KVS_OK;
    if (want < least || want > most)
        return kvs_fail(err, KVS_E_CONFIG,
                        "pool.max_bytes: %s needs a restart; %s to %s can be had without: from an extent to what was "
                        "reserved. A larger pool.reserve_bytes at the next start makes room for more",
                        option_say_size(text[0], (int64_t)want), option_say_size(text[1], (int64_t)least),
                        option_say_size(text[2], (int64_t)most));
    return check_floors(c, next, err);
}
