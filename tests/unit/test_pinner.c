#include "daemon/pinner.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "tests/support/sink.h"

/* A gate that holds the pinner inside a task until the test has queued what it wants. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool inside, open;
} gate;

typedef struct numbered {
    pinner_task task; /* first */
    unsigned id;
} numbered;

static sink done;
static pinner *p;
static gate door = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
static unsigned order[16], n_run, n_done; /* n_run: the pinner's until it is joined or its task is done */

static void on_done(work *w)
{
    (void)w;
    n_done++;
}

static void run_numbered(pinner_task *t)
{
    order[n_run++] = ((numbered *)(void *)t)->id;
}

static void run_gate(pinner_task *t)
{
    (void)t;
    pthread_mutex_lock(&door.lock);
    door.inside = true;
    pthread_cond_broadcast(&door.cond);
    while (!door.open)
        pthread_cond_wait(&door.cond, &door.lock);
    pthread_mutex_unlock(&door.lock);
}

static void await_inside(void)
{
    pthread_mutex_lock(&door.lock);
    while (!door.inside)
        pthread_cond_wait(&door.cond, &door.lock);
    pthread_mutex_unlock(&door.lock);
}

static void open_gate(void)
{
    pthread_mutex_lock(&door.lock);
    door.open = true;
    pthread_cond_broadcast(&door.cond);
    pthread_mutex_unlock(&door.lock);
}

static void setup(void)
{
    kvs_err err;

    sink_init(&done);
    cr_assert_eq(pinner_create(&p, sink_face(&done), &err), KVS_OK, "%s", err.msg);
}

static void teardown(void)
{
    sink_fini(&done);
}

TestSuite(pinner, .init = setup, .fini = teardown);

static numbered task(unsigned id)
{
    return (numbered){.task = {.work = {.on_done = on_done}, .run = run_numbered}, .id = id};
}

Test(pinner, runs_urgent_tasks_before_others_and_each_in_order)
{
    pinner_task blocker = {.work = {.on_done = on_done}, .run = run_gate};
    numbered t[4] = {task(0), task(1), task(2), task(3)};

    pinner_submit(p, &blocker, false);
    await_inside();
    pinner_submit(p, &t[0].task, false);
    pinner_submit(p, &t[1].task, false);
    pinner_submit(p, &t[2].task, true);
    pinner_submit(p, &t[3].task, true);
    open_gate();
    cr_assert(sink_run_until(&done, 5));
    cr_assert_eq(n_done, 5);
    cr_assert_eq(order[0], 2);
    cr_assert_eq(order[1], 3);
    cr_assert_eq(order[2], 0);
    cr_assert_eq(order[3], 1);
    pinner_destroy(p);
}

Test(pinner, runs_what_is_queued_before_it_ends)
{
    pinner_task blocker = {.work = {.on_done = on_done}, .run = run_gate};
    numbered t[3] = {task(0), task(1), task(2)};

    pinner_submit(p, &blocker, true);
    await_inside();
    for (int i = 0; i < 3; i++)
        pinner_submit(p, &t[i].task, i == 1);
    open_gate();
    pinner_destroy(p);
    cr_assert_eq(n_run, 3);
    cr_assert_eq(sink_posted(&done), 4, "destroy returned before everything was posted");
    cr_assert_eq(n_done, 0, "a callback ran on the pinner's thread");
    cr_assert(sink_run_until(&done, 4));
}

static sigset_t seen_mask;

static void run_look(pinner_task *t)
{
    (void)t;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &seen_mask);
}

Test(pinner, takes_no_signals)
{
    pinner_task t = {.work = {.on_done = on_done}, .run = run_look};

    pinner_submit(p, &t, false);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(sigismember(&seen_mask, SIGTERM), 1);
    cr_assert_eq(sigismember(&seen_mask, SIGHUP), 1);
    cr_assert_eq(sigismember(&seen_mask, SIGINT), 1);
    pinner_destroy(p);
}

Test(pinner, destroys_nothing)
{
    pinner_destroy(NULL);
    pinner_destroy(p);
    cr_assert_eq(sink_posted(&done), 0);
}
