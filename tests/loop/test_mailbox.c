#include "daemon/mailbox.h"

#include <criterion/criterion.h>
#include <unistd.h>

#include "proto/cpus.h"
#include "tests/support/loop_fixture.h"

enum { N_THREADS = 4, N_EACH = 2000 };

typedef struct item {
    work work;
    unsigned thread, number;
} item;

/* Threads wait without sleeping only where there are processors enough: here they always do. */
unsigned cpus_usable(void)
{
    return 16;
}

static unsigned done_total, done_of[N_THREADS], out_of_order;
static uv_thread_t loop_thread;

static void on_done(work *w)
{
    const item *i = (const item *)(const void *)w;
    uv_thread_t me = uv_thread_self();

    out_of_order += i->number != done_of[i->thread] || !uv_thread_equal(&me, &loop_thread);
    done_of[i->thread]++;
    done_total++;
}

typedef struct poster {
    work_sink sink;
    item *items;
} poster;

static void post_all(void *arg)
{
    const poster *p = arg;

    for (unsigned i = 0; i < N_EACH; i++)
        p->sink.post(p->sink.ud, &p->items[i].work);
}

static bool is_all_done(void *ud)
{
    return done_total == *(unsigned *)ud;
}

Test(mailbox, runs_every_completion_once_in_the_order_of_its_thread)
{
    static item items[N_THREADS][N_EACH];
    unsigned all = N_THREADS * N_EACH;
    uv_thread_t threads[N_THREADS];
    poster posters[N_THREADS];
    uv_loop_t loop;
    mailbox *m;

    loop_thread = uv_thread_self();
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&m, &loop, NULL), KVS_OK);
    for (unsigned t = 0; t < N_THREADS; t++) {
        for (unsigned i = 0; i < N_EACH; i++)
            items[t][i] = (item){.work = {.on_done = on_done}, .thread = t, .number = i};
        posters[t] = (poster){mailbox_sink(m), items[t]};
        cr_assert_eq(uv_thread_create(&threads[t], post_all, &posters[t]), 0);
    }
    cr_assert(loop_until(&loop, is_all_done, &all, 5000));
    for (unsigned t = 0; t < N_THREADS; t++)
        cr_assert_eq(uv_thread_join(&threads[t]), 0);
    cr_assert_eq(out_of_order, 0);
    mailbox_close(m);
    cr_assert(loop_end(&loop));
}

Test(mailbox, drains_before_the_loop_is_told)
{
    item one = {.work = {.on_done = on_done}};
    work_sink sink;
    uv_loop_t loop;
    mailbox *m;

    loop_thread = uv_thread_self();
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&m, &loop, NULL), KVS_OK);
    sink = mailbox_sink(m);
    sink.post(sink.ud, &one.work);
    cr_assert_eq(done_total, 0);
    mailbox_drain(m);
    cr_assert_eq(done_total, 1);
    mailbox_drain(m);
    cr_assert_eq(done_total, 1);
    mailbox_close(m);
    cr_assert(loop_end(&loop));
}

static mailbox *nested;
static item second = {.work = {.on_done = on_done}, .number = 1};

static void on_done_drains(work *w)
{
    on_done(w);
    mailbox_drain(nested);
}

Test(mailbox, keeps_the_order_when_a_completion_drains)
{
    item first = {.work = {.on_done = on_done_drains}};
    work_sink sink;
    uv_loop_t loop;

    loop_thread = uv_thread_self();
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&nested, &loop, NULL), KVS_OK);
    sink = mailbox_sink(nested);
    sink.post(sink.ud, &first.work);
    sink.post(sink.ud, &second.work);
    mailbox_close(nested); /* drains what is left */
    cr_assert_eq(done_total, 2);
    cr_assert_eq(out_of_order, 0);
    cr_assert(loop_end(&loop));
}

/* ---- posts that are announced ---- */

typedef struct announcer {
    work_sink sink;
    item item;
    unsigned pause_us;
} announcer;

static void announce_and_post(void *arg)
{
    announcer *a = arg;

    a->sink.soon(a->sink.ud);
    (void)usleep(a->pause_us);
    a->sink.post(a->sink.ud, &a->item.work);
}

/* Whether the loop still looks out for it, sleeps in short steps, or has given it up. */
Test(mailbox, runs_what_was_announced_however_late_it_comes)
{
    static const unsigned pauses[] = {0, 100, 5000, 60000};
    uv_loop_t loop;
    mailbox *m;

    loop_thread = uv_thread_self();
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&m, &loop, NULL), KVS_OK);
    for (unsigned i = 0; i < 4; i++) {
        announcer a = {
            .sink = mailbox_sink(m), .item = {.work = {.on_done = on_done}, .number = i}, .pause_us = pauses[i]};
        unsigned want = i + 1;
        uv_thread_t t;

        cr_assert_eq(uv_thread_create(&t, announce_and_post, &a), 0);
        cr_assert(loop_until(&loop, is_all_done, &want, 5000), "after %u us", pauses[i]);
        cr_assert_eq(uv_thread_join(&t), 0);
    }
    cr_assert_eq(out_of_order, 0);
    mailbox_close(m);
    cr_assert(loop_end(&loop));
}

static uint64_t cpu_us(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void on_timer(uv_timer_t *t)
{
    uv_stop(t->loop);
}

/* A job that never ends: the loop is not busy for ever with looking out for it. */
Test(mailbox, goes_back_to_sleep_when_nothing_follows)
{
    work_sink sink;
    uv_timer_t timer;
    uv_loop_t loop;
    mailbox *m;
    uint64_t used;

    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&m, &loop, NULL), KVS_OK);
    sink = mailbox_sink(m);
    (void)uv_timer_init(&loop, &timer);
    sink.soon(sink.ud);
    (void)uv_timer_start(&timer, on_timer, 100, 0); /* awake at first */
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    used = cpu_us();
    (void)uv_timer_start(&timer, on_timer, 500, 0);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert_leq(cpu_us() - used, 20000, "%llu us of 500 ms", (unsigned long long)(cpu_us() - used));
    uv_close((uv_handle_t *)&timer, NULL);
    mailbox_close(m);
    cr_assert(loop_end(&loop));
}
