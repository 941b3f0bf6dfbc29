#include "tests/support/sink.h"

#include <stddef.h>
#include <time.h>

enum { PATIENCE_S = 30 };

void sink_init(sink *s)
{
    (void)pthread_mutex_init(&s->lock, NULL);
    (void)pthread_cond_init(&s->posted_one, NULL);
    s->head = NULL;
    s->tail = &s->head;
    s->posted = s->done = 0;
}

void sink_fini(sink *s)
{
    (void)pthread_cond_destroy(&s->posted_one);
    (void)pthread_mutex_destroy(&s->lock);
}

static void sink_post(void *ud, work *w)
{
    sink *s = ud;

    pthread_mutex_lock(&s->lock);
    w->next = NULL;
    *s->tail = w;
    s->tail = &w->next;
    s->posted++;
    pthread_cond_signal(&s->posted_one);
    pthread_mutex_unlock(&s->lock);
}

work_sink sink_face(sink *s)
{
    return (work_sink){.post = sink_post, .ud = s};
}

/* The next completion, or NULL when `until` has passed. */
static work *sink_take(sink *s, const struct timespec *until)
{
    work *w;

    pthread_mutex_lock(&s->lock);
    while (s->head == NULL)
        if (pthread_cond_timedwait(&s->posted_one, &s->lock, until) != 0)
            break;
    w = s->head;
    if (w != NULL) {
        s->head = w->next;
        if (s->head == NULL)
            s->tail = &s->head;
    }
    pthread_mutex_unlock(&s->lock);
    return w;
}

bool sink_run_until(sink *s, unsigned count)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    while (s->done < count) {
        work *w = sink_take(s, &until);

        if (w == NULL)
            return false;
        s->done++;
        w->on_done(w);
    }
    return true;
}

unsigned sink_posted(sink *s)
{
    unsigned n;

    pthread_mutex_lock(&s->lock);
    n = s->posted;
    pthread_mutex_unlock(&s->lock);
    return n;
}
