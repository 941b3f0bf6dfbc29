/* Events: what became of blocks, told to the clients that watch, in batches. */
#include <stdlib.h>
#include <string.h>

#include "daemon/core.h"

static uint32_t send_some(core *c);

void core_on_event(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32])
{
    core *c = ud;
    core_event *e;

    if (c->n_watchers == 0)
        return;
    if (c->n_events == CORE_EVENTS)
        (void)send_some(c);
    e = &c->events[(c->first_event + c->n_events++) % CORE_EVENTS];
    *e = (core_event){.type = type, .cause = cause, .ns = ns, .depth = depth};
    if (key)
        memcpy(e->key, key, sizeof(e->key));
}

static const core_event *event_at(const core *c, uint32_t i)
{
    return &c->events[(c->first_event + i) % CORE_EVENTS];
}

static bool is_for(const peer *p, uint32_t i)
{
    const core_event *e = event_at(p->core, i);
    const directory_ns *n;

    if (!(p->watch_mask & (UINT32_C(1) << e->type)) || p->core->n_told + i < p->watch_from)
        return false;
    if (p->tenant == TENANT_ADMIN)
        return true;
    n = directory_namespace(p->core->dir, e->ns);
    return n && !n->gone && tenant_may(p->tenant, n->tenant);
}

/* The n of the first `most` that are for this peer. */
static reply *event_frame(const peer *p, uint32_t most, uint32_t n)
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
    for (uint32_t i = 0; i < most; i++) {
        const core_event *e = event_at(c, i);
        wire_event_item item = {.type = e->type, .ns = e->ns, .depth = e->depth, .cause = e->cause};

        if (!is_for(p, i))
            continue;
        memcpy(item.key, e->key, sizeof(item.key));
        wire_put_event_item(&o, &item);
    }
    return x;
}

static void send_events(peer *p, uint32_t most)
{
    uint32_t n = 0;
    reply *x = NULL;

    for (uint32_t i = 0; i < most; i++)
        n += is_for(p, i);
    if (n == 0)
        return;
    if (!p->ops->is_behind(p->ud))
        x = event_frame(p, most, n);
    if (!x) {
        p->watch_lost += n;
        return;
    }
    p->watch_seq++;
    p->ops->send(p->ud, x);
}

/* The first ones, as many as go into a frame, to everybody.  Returns the watchers that there are. */
static uint32_t send_some(core *c)
{
    uint32_t m = c->n_events < CORE_EVENT_BATCH ? c->n_events : CORE_EVENT_BATCH, n = 0;

    for (peer *p = c->peers; p; p = p->next)
        if (p->watch_mask && !p->gone) {
            send_events(p, m);
            n++;
        }
    c->first_event = (c->first_event + m) % CORE_EVENTS;
    c->n_events -= m;
    c->n_told += m;
    return n;
}

void core_rest(core *c)
{
    uint32_t n = 0;

    if (c->shrinks)
        core_resize(c);
    while (c->n_events > 0 && n < CORE_EVENT_FRAMES)
        n += send_some(c);
    c->step_due = c->step_due || c->n_events > 0;
}
