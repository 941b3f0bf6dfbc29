/* Events: what became of blocks, told to the clients that watch, in batches. */
#include <stdlib.h>
#include <string.h>

#include "daemon/core.h"

void core_on_event(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32])
{
    core *c = ud;
    core_event *e;

    if (c->n_watchers == 0)
        return;
    if (c->n_events == CORE_EVENT_BATCH)
        core_rest(c);
    e = &c->events[c->n_events++];
    *e = (core_event){.type = type, .cause = cause, .ns = ns, .depth = depth};
    if (key)
        memcpy(e->key, key, sizeof(e->key));
}

static bool is_for(const peer *p, const core_event *e)
{
    const directory_ns *n;

    if (!(p->watch_mask & (UINT32_C(1) << e->type)))
        return false;
    if (p->tenant == TENANT_ADMIN)
        return true;
    n = directory_namespace(p->core->dir, e->ns);
    return n && !n->gone && tenant_may(p->tenant, n->tenant);
}

static reply *event_frame(const peer *p, uint32_t n)
{
    const core *c = p->core;
    size_t room = WIRE_event_BYTES + (size_t)n * WIRE_event_item_BYTES;
    reply *x = malloc(sizeof(*x) + WIRE_HEADER_BYTES + room);
    wire_event head = {.seq = p->watch_seq + 1, .lost = p->watch_lost, .n = n};
    wire_header h = {.op = WIRE_EVENT, .id = p->watch_id, .body_len = (uint32_t)room};
    wire_out o;

    if (!x)
        return NULL;
    *x = (reply){.len = WIRE_HEADER_BYTES + room, .held = sizeof(*x) + WIRE_HEADER_BYTES + room};
    o = (wire_out){x->bytes + WIRE_HEADER_BYTES, 0, room, false};
    wire_header_encode(&h, x->bytes);
    wire_put_event(&o, &head);
    for (uint32_t i = 0; i < c->n_events; i++) {
        const core_event *e = &c->events[i];
        wire_event_item item = {.type = e->type, .ns = e->ns, .depth = e->depth, .cause = e->cause};

        if (!is_for(p, e))
            continue;
        memcpy(item.key, e->key, sizeof(item.key));
        wire_put_event_item(&o, &item);
    }
    return x;
}

static void send_events(peer *p)
{
    uint32_t n = 0;
    reply *x = NULL;

    for (uint32_t i = 0; i < p->core->n_events; i++)
        n += is_for(p, &p->core->events[i]);
    if (n == 0)
        return;
    if (!p->ops->is_behind(p->ud))
        x = event_frame(p, n);
    if (!x) {
        p->watch_lost += n;
        return;
    }
    p->watch_seq++;
    p->ops->send(p->ud, x);
}

void core_rest(core *c)
{
    if (c->shrinks)
        core_resize(c);
    if (c->n_events == 0)
        return;
    for (peer *p = c->peers; p; p = p->next)
        if (p->watch_mask && !p->gone)
            send_events(p);
    c->n_events = 0;
}
