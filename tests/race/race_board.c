/* The board under TSan: a loop that changes its numbers and turns, readers that want a whole and recent picture. */
#include "daemon/board.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <uv.h>

#include "daemon/mailbox.h"

enum { READERS = 4, READS = 400 };

typedef struct world {
    uint64_t state;        /* the loop's own */
    _Atomic uint64_t done; /* what a client has been told: a picture asked for afterwards has it */
    board *board;
    _Atomic unsigned n_left, wrong, stale;
} world;

static void fill(void *ud, metrics_snapshot *s)
{
    const world *w = ud;

    s->uptime_us = s->counts.received = s->dir.stored = w->state;
    s->tenants[METRICS_TENANTS].counts.hits = s->error[METRICS_RULES - 1] = (int64_t)w->state;
    s->taken_us = uv_hrtime() / 1000;
}

static void read_all(void *arg)
{
    metrics_snapshot *s = malloc(sizeof *s);
    world *w = arg;
    uint64_t last = 0;

    for (unsigned i = 0; s != NULL && i < READS; i++) {
        uint64_t told = atomic_load(&w->done);

        board_read(w->board, 10000000, s);
        if (s->counts.received != s->uptime_us || s->dir.stored != s->uptime_us ||
            s->tenants[METRICS_TENANTS].counts.hits != s->uptime_us ||
            s->error[METRICS_RULES - 1] != (int64_t)s->uptime_us)
            atomic_fetch_add(&w->wrong, 1);
        if (s->uptime_us < told || s->seq < last)
            atomic_fetch_add(&w->stale, 1);
        last = s->seq;
        (void)board_turn_age_us(w->board);
    }
    free(s);
    atomic_fetch_sub(&w->n_left, 1);
}

int main(void)
{
    world w = {.n_left = READERS};
    uv_thread_t threads[READERS];
    uv_loop_t loop;
    mailbox *m;
    bool good;

    if (uv_loop_init(&loop) != 0 || mailbox_create(&m, &loop, NULL) != KVS_OK ||
        board_create(&w.board, mailbox_sink(m), fill, &w, NULL) != KVS_OK)
        return 1;
    for (int i = 0; i < READERS; i++)
        if (uv_thread_create(&threads[i], read_all, &w) != 0)
            return 1;
    while (atomic_load(&w.n_left) > 0) {
        w.state++;
        atomic_store(&w.done, w.state);
        board_turned(w.board, uv_hrtime() / 1000);
        (void)uv_run(&loop, UV_RUN_NOWAIT);
    }
    for (int i = 0; i < READERS; i++)
        (void)uv_thread_join(&threads[i]);
    board_close(w.board);
    mailbox_close(m);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    good = uv_loop_close(&loop) == 0 && w.wrong == 0 && w.stale == 0;
    board_destroy(w.board);
    printf("torn %u, stale %u\n%d passed, %d failed\n", w.wrong, w.stale, good, !good);
    return !good;
}
