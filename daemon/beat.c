#include "daemon/beat.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "daemon/thread.h"

/* One word holds both: a reader never sees the time of one state with the name of another. */
typedef struct beat {
    const char *name;       /* NULL: free; under the lock */
    _Atomic uint64_t state; /* microseconds << 2 | beat_state */
} beat;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the names */
static beat beats[BEAT_MAX];
static _Thread_local beat *mine;

static uint64_t word(enum beat_state s)
{
    return thread_now_us() << 2 | (uint64_t)s;
}

bool beat_join(const char *name)
{
    (void)pthread_mutex_lock(&lock);
    for (size_t i = 0; i < BEAT_MAX && mine == NULL; i++) {
        if (beats[i].name != NULL)
            continue;
        mine = &beats[i];
        mine->name = name;
        atomic_store_explicit(&mine->state, word(BEAT_RUNNING), memory_order_relaxed);
    }
    (void)pthread_mutex_unlock(&lock);
    return mine != NULL;
}

void beat_leave(void)
{
    if (mine == NULL)
        return;
    (void)pthread_mutex_lock(&lock);
    mine->name = NULL;
    (void)pthread_mutex_unlock(&lock);
    mine = NULL;
}

void beat_mark(enum beat_state s)
{
    if (mine != NULL)
        atomic_store_explicit(&mine->state, word(s), memory_order_relaxed);
}

beat_age beat_oldest(enum beat_state s)
{
    beat_age oldest = {NULL, 0};

    (void)pthread_mutex_lock(&lock);
    for (size_t i = 0; i < BEAT_MAX; i++) {
        uint64_t w = atomic_load_explicit(&beats[i].state, memory_order_relaxed);
        uint64_t now = thread_now_us(), since = w >> 2, age = now > since ? now - since : 0;

        if (beats[i].name != NULL && (w & 3) == (uint64_t)s && (oldest.name == NULL || age > oldest.us))
            oldest = (beat_age){beats[i].name, age};
    }
    (void)pthread_mutex_unlock(&lock);
    return oldest;
}
