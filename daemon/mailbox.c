#include "daemon/mailbox.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "daemon/thread.h"

enum {
    SOON_US = 400, /* that the loop stays awake for a post that was announced: twice what it may take */
    /* After that, for a while, it sleeps in short steps: a processor that has slept for milliseconds is 60 us away. */
    DOZE_STEP_NS = 150000,
    DOZE_US = 30000,
};

struct mailbox {
    uv_async_t wake;
    uv_idle_t no_wait; /* while active, the loop looks and does not wait */
    uv_poll_t steps;
    int timer_fd; /* of steps */
    bool dozes;
    unsigned n_handles;
    bool may_spin;
    _Atomic uint64_t soon_until_us; /* a post was announced */
    uint64_t stay_until_us;         /* somebody on the loop asks for it */
    uv_mutex_t lock;
    work *head, **tail; /* posted; under the lock */
    _Atomic bool
        mail;    /* head is not NULL: spares the lock, which a thread that posts must not find taken again and again */
    work *ready; /* taken by the loop, not yet run */
};

static void post(void *ud, work *w)
{
    mailbox *m = ud;

    w->next = NULL;
    uv_mutex_lock(&m->lock);
    *m->tail = w;
    m->tail = &w->next;
    atomic_store_explicit(&m->mail, true, memory_order_release);
    uv_mutex_unlock(&m->lock);
    (void)uv_async_send(&m->wake); /* fails only for a handle that is no async */
}

static void soon(void *ud)
{
    mailbox *m = ud;

    if (!m->may_spin)
        return;
    atomic_store_explicit(&m->soon_until_us, uv_hrtime() / 1000 + SOON_US, memory_order_relaxed);
    (void)uv_async_send(&m->wake);
}

static bool is_soon(const mailbox *m, uint64_t now)
{
    return now < atomic_load_explicit(&m->soon_until_us, memory_order_relaxed);
}

/* Without waiting for the wake-up, which is one more turn away. */
static void on_no_wait(uv_idle_t *h)
{
    mailbox *m = h->data;
    uint64_t now = uv_hrtime() / 1000;

    mailbox_drain(m);
    if (!is_soon(m, now) && now >= m->stay_until_us)
        (void)uv_idle_stop(&m->no_wait);
}

void mailbox_stay_awake(mailbox *m, uint64_t us)
{
    if (!m->may_spin)
        return;
    m->stay_until_us = uv_hrtime() / 1000 + us;
    (void)uv_idle_start(&m->no_wait, on_no_wait);
}

static void set_steps(mailbox *m, long ns)
{
    struct itimerspec t = {.it_value = {0, ns}, .it_interval = {0, ns}};

    m->dozes = ns != 0;
    (void)timerfd_settime(m->timer_fd, 0, &t, NULL);
}

static void on_step(uv_poll_t *h, int status, int events)
{
    mailbox *m = h->data;
    uint64_t n;

    (void)status;
    (void)events;
    (void)!read(m->timer_fd, &n, sizeof n);
    if (uv_hrtime() / 1000 >= atomic_load_explicit(&m->soon_until_us, memory_order_relaxed) + DOZE_US)
        set_steps(m, 0);
}

static void on_wake(uv_async_t *h)
{
    mailbox *m = h->data;

    mailbox_drain(m);
    if (!is_soon(m, uv_hrtime() / 1000))
        return;
    (void)uv_idle_start(&m->no_wait, on_no_wait);
    if (!m->dozes)
        set_steps(m, DOZE_STEP_NS);
}

static void on_closed(uv_handle_t *h);

static kvs_status no_steps(mailbox *m, kvs_err *err)
{
    int e = errno;

    mailbox_close(m);
    return kvs_fail(err, KVS_E_SYS, "mailbox: timer: %s", strerror(e));
}

kvs_status mailbox_create(mailbox **ret, uv_loop_t *loop, kvs_err *err)
{
    mailbox *m = calloc(1, sizeof *m);
    int rc;

    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "mailbox: out of memory");
    m->tail = &m->head;
    rc = uv_mutex_init(&m->lock);
    if (rc != 0) {
        free(m);
        return kvs_fail(err, KVS_E_SYS, "mailbox: mutex: %s", uv_strerror(rc));
    }
    rc = uv_async_init(loop, &m->wake, on_wake);
    if (rc != 0) {
        uv_mutex_destroy(&m->lock);
        free(m);
        return kvs_fail(err, KVS_E_SYS, "mailbox: wake-up: %s", uv_strerror(rc));
    }
    (void)uv_idle_init(loop, &m->no_wait);
    m->wake.data = m->no_wait.data = m->steps.data = m;
    m->n_handles = 2;
    m->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (m->timer_fd < 0 || uv_poll_init(loop, &m->steps, m->timer_fd) != 0)
        return no_steps(m, err);
    m->n_handles = 3;
    (void)uv_poll_start(&m->steps, UV_READABLE, on_step);
    m->may_spin = thread_may_spin();
    *ret = m;
    return KVS_OK;
}

work_sink mailbox_sink(mailbox *m)
{
    return (work_sink){.post = post, .ud = m, .soon = soon};
}

void mailbox_drain(mailbox *m)
{
    work *w;

    /* else: called from an on_done; go on with what is already taken, in order */
    if (m->ready == NULL && atomic_load_explicit(&m->mail, memory_order_acquire)) {
        uv_mutex_lock(&m->lock);
        atomic_store_explicit(&m->mail, false, memory_order_relaxed);
        m->ready = m->head;
        m->head = NULL;
        m->tail = &m->head;
        uv_mutex_unlock(&m->lock);
    }
    while ((w = m->ready) != NULL) {
        m->ready = w->next; /* before the call: the work may be freed or posted again by it */
        w->on_done(w);
    }
}

static void on_closed(uv_handle_t *h)
{
    mailbox *m = h->data;

    if (--m->n_handles > 0)
        return;
    if (m->timer_fd >= 0)
        (void)close(m->timer_fd);
    uv_mutex_destroy(&m->lock);
    free(m);
}

void mailbox_close(mailbox *m)
{
    if (m == NULL)
        return;
    mailbox_drain(m);
    if (m->n_handles == 3)
        uv_close((uv_handle_t *)&m->steps, on_closed);
    uv_close((uv_handle_t *)&m->no_wait, on_closed);
    uv_close((uv_handle_t *)&m->wake, on_closed);
}
