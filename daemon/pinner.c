#include "daemon/pinner.h"

#include <pthread.h>
#include <stdlib.h>

#include "daemon/beat.h"
#include "daemon/thread.h"

typedef struct task_list {
    work *head, **tail;
} task_list;

struct pinner {
    work_sink sink;
    pthread_t thread;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t wake;
    task_list urgent, other;
    bool closing;
};

static void list_init(task_list *l)
{
    l->head = NULL;
    l->tail = &l->head;
}

static void list_push(task_list *l, work *w)
{
    w->next = NULL;
    *l->tail = w;
    l->tail = &w->next;
}

static work *list_pop(task_list *l)
{
    work *w = l->head;

    if (w == NULL)
        return NULL;
    l->head = w->next;
    if (l->head == NULL)
        l->tail = &l->head;
    w->next = NULL;
    return w;
}

/* The next task; NULL at the end. */
static work *next_task(pinner *p)
{
    work *w;

    beat_mark(BEAT_PARKED);
    pthread_mutex_lock(&p->lock);
    while (p->urgent.head == NULL && p->other.head == NULL && !p->closing)
        pthread_cond_wait(&p->wake, &p->lock);
    w = list_pop(&p->urgent);
    if (w == NULL)
        w = list_pop(&p->other);
    pthread_mutex_unlock(&p->lock);
    beat_mark(BEAT_RUNNING);
    return w;
}

static void *pinner_main(void *arg)
{
    pinner *p = arg;
    work *w;

    (void)beat_join("kvs-pinner");
    while ((w = next_task(p)) != NULL) {
        pinner_task *t = (pinner_task *)(void *)w;

        beat_mark(BEAT_IN_CALL); /* all that it runs are calls of the device or the system */
        t->run(t);
        beat_mark(BEAT_RUNNING);
        p->sink.post(p->sink.ud, w);
    }
    beat_leave();
    return NULL;
}

kvs_status pinner_create(pinner **ret, work_sink sink, kvs_err *err)
{
    pinner *p = calloc(1, sizeof *p);
    kvs_status s;

    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pinner: no memory");
    p->sink = sink;
    list_init(&p->urgent);
    list_init(&p->other);
    (void)pthread_mutex_init(&p->lock, NULL);
    (void)pthread_cond_init(&p->wake, NULL);
    s = thread_start(&p->thread, "kvs-pinner", pinner_main, p, err);
    if (s != KVS_OK) {
        (void)pthread_cond_destroy(&p->wake);
        (void)pthread_mutex_destroy(&p->lock);
        free(p);
        return s;
    }
    *ret = p;
    return KVS_OK;
}

void pinner_submit(pinner *p, pinner_task *t, bool urgent)
{
    pthread_mutex_lock(&p->lock);
    list_push(urgent ? &p->urgent : &p->other, &t->work);
    pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

void pinner_destroy(pinner *p)
{
    if (p == NULL)
        return;
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->lock);
    (void)pthread_join(p->thread, NULL);
    (void)pthread_cond_destroy(&p->wake);
    (void)pthread_mutex_destroy(&p->lock);
    free(p);
}
