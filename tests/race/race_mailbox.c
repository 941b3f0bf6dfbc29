/* Mailbox under TSan: workers write plain memory and post, the loop reads it in on_done, also when it drains early. */
#include "daemon/mailbox.h"

#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 20, THREADS = 4, WORKS = 500 };

typedef struct counted {
    work work; /* first */
    unsigned value, seen;
} counted;

typedef struct poster {
    work_sink sink;
    unsigned thread;
} poster;

static counted works[THREADS][WORKS];
static unsigned n_seen;

static void on_done(work *w)
{
    counted *c = (counted *)(void *)w;

    c->seen = c->value;
    n_seen++;
}

static void post_all(void *arg)
{
    const poster *p = arg;

    for (unsigned i = 0; i < WORKS; i++) {
        works[p->thread][i].value = i + 1;
        p->sink.post(p->sink.ud, &works[p->thread][i].work);
    }
}

static unsigned one_round(void)
{
    uv_thread_t threads[THREADS];
    poster posters[THREADS];
    unsigned wrong = 0;
    uv_loop_t loop;
    mailbox *m;

    n_seen = 0;
    if (uv_loop_init(&loop) != 0 || mailbox_create(&m, &loop, NULL) != KVS_OK)
        abort();
    for (unsigned t = 0; t < THREADS; t++) {
        for (unsigned i = 0; i < WORKS; i++)
            works[t][i] = (counted){.work = {.on_done = on_done}};
        posters[t] = (poster){mailbox_sink(m), t};
        if (uv_thread_create(&threads[t], post_all, &posters[t]) != 0)
            abort();
    }
    while (n_seen < THREADS * WORKS) {
        mailbox_drain(m);
        if (n_seen < THREADS * WORKS)
            (void)uv_run(&loop, UV_RUN_ONCE);
    }
    for (unsigned t = 0; t < THREADS; t++)
        (void)uv_thread_join(&threads[t]);
    for (unsigned t = 0; t < THREADS; t++)
        for (unsigned i = 0; i < WORKS; i++)
            wrong += works[t][i].seen != i + 1;
    mailbox_close(m);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    return wrong + (uv_loop_close(&loop) != 0);
}

int main(void)
{
    unsigned passed = 0, failed = 0;

    for (int r = 0; r < ROUNDS; r++) {
        if (one_round() == 0)
            passed++;
        else
            failed++;
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
