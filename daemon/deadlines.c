/* Deadlines of requests: a binary heap, the earliest first; due_at is the place in it plus one. */
#include <stdlib.h>

#include "daemon/core.h"

static void heap_put(core *c, size_t i, request *r)
{
    c->due[i] = r;
    r->due_at = i + 1;
}

static void heap_up(core *c, size_t i, request *r)
{
    while (i > 0 && c->due[(i - 1) / 2]->deadline_us > r->deadline_us) {
        heap_put(c, i, c->due[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    heap_put(c, i, r);
}

static void heap_down(core *c, size_t i, request *r)
{
    for (;;) {
        size_t k = 2 * i + 1;

        if (k + 1 < c->n_due && c->due[k + 1]->deadline_us < c->due[k]->deadline_us)
            k++;
        if (k >= c->n_due || c->due[k]->deadline_us >= r->deadline_us)
            break;
        heap_put(c, i, c->due[k]);
        i = k;
    }
    heap_put(c, i, r);
}

kvs_status core_due_add(core *c, request *r)
{
    if (c->n_due == c->cap_due) {
        size_t cap = c->cap_due ? c->cap_due * 2 : 64;
        request **due = realloc(c->due, cap * sizeof(request *));

        if (!due)
            return KVS_E_NO_MEMORY;
        c->due = due;
        c->cap_due = cap;
    }
    heap_up(c, c->n_due++, r);
    return KVS_OK;
}

void core_due_remove(core *c, request *r)
{
    size_t i = r->due_at;
    request *last;

    if (i == 0)
        return;
    r->due_at = 0;
    last = c->due[--c->n_due];
    if (last == r)
        return;
    heap_up(c, i - 1, last);
    heap_down(c, last->due_at - 1, last);
}

static void run_overdue(request *r)
{
    bool untouched = r->ops->stop(r, true);
    kvs_err err;

    (void)kvs_fail(&err, KVS_E_DEADLINE, "deadline: passed %s",
                   untouched ? "before anything was touched" : "while it was running; CANCEL says when it has stopped");
    r->ops->overdue(r, untouched);
    request_answer(r, KVS_E_DEADLINE, &err);
}

void core_due_run(core *c)
{
    while (c->n_due > 0 && c->due[0]->deadline_us <= c->now_us)
        run_overdue(c->due[0]);
}
