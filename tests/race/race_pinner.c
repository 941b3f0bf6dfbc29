/* Pinner under TSan: tasks touch plain memory on the pinner's thread, the loop reads it after on_done. */
#include <stdio.h>
#include <stdlib.h>

#include "daemon/pinner.h"
#include "tests/support/sink.h"

enum { ROUNDS = 200, TASKS = 64 };

typedef struct counted {
    pinner_task task; /* first */
    unsigned input, output, done;
} counted;

static counted tasks[TASKS];

static void run(pinner_task *t)
{
    counted *c = (counted *)(void *)t;

    c->output = c->input * 3;
}

static void on_done(work *w)
{
    counted *c = (counted *)(void *)w;

    c->done += c->output == c->input * 3;
}

static unsigned one_round(void)
{
    pinner *p;
    sink done;
    kvs_err err;
    unsigned wrong = 0;

    sink_init(&done);
    if (pinner_create(&p, sink_face(&done), &err) != KVS_OK)
        abort();
    for (unsigned t = 0; t < TASKS; t++) {
        tasks[t] = (counted){.task = {.work = {.on_done = on_done}, .run = run}, .input = t + 1};
        pinner_submit(p, &tasks[t].task, t % 3 == 0);
        wrong += t % 16 == 15 && !sink_run_until(&done, t / 2);
    }
    pinner_destroy(p);
    wrong += !sink_run_until(&done, TASKS);
    for (unsigned t = 0; t < TASKS; t++)
        wrong += tasks[t].done != 1;
    sink_fini(&done);
    return wrong;
}

int main(void)
{
    unsigned passed = 0, failed = 0;

    for (int r = 0; r < ROUNDS; r++) {
        unsigned wrong = one_round();

        passed += wrong == 0;
        failed += wrong != 0;
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
