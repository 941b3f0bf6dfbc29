#include <criterion/criterion.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "daemon/beat.h"
#include "daemon/thread.h"

static sem_t marked, go;

static void *in_a_call(void *arg)
{
    (void)beat_join("thread-a");
    beat_mark(*(enum beat_state *)arg);
    (void)sem_post(&marked);
    (void)sem_wait(&go);
    beat_leave();
    return NULL;
}

static void wait_us(uint64_t us)
{
    uint64_t end = thread_now_us() + us;

    while (thread_now_us() < end)
        ;
}

Test(beat, tells_a_thread_in_a_call_from_one_of_our_own)
{
    enum beat_state s = BEAT_IN_CALL;
    pthread_t t;
    kvs_err err;

    (void)sem_init(&marked, 0, 0);
    (void)sem_init(&go, 0, 0);
    cr_assert_eq(thread_start(&t, "a", in_a_call, &s, &err), KVS_OK);
    (void)sem_wait(&marked);
    wait_us(2000);
    cr_assert_null(beat_oldest(BEAT_RUNNING).name);
    cr_assert_str_eq(beat_oldest(BEAT_IN_CALL).name, "thread-a");
    cr_assert_geq(beat_oldest(BEAT_IN_CALL).us, 2000);
    (void)sem_post(&go);
    (void)pthread_join(t, NULL);
    cr_assert_null(beat_oldest(BEAT_IN_CALL).name, "a thread that has left is not old");
}

Test(beat, a_mark_is_a_sign_of_life)
{
    cr_assert(beat_join("me"));
    wait_us(3000);
    cr_assert_geq(beat_oldest(BEAT_RUNNING).us, 3000);
    beat_mark(BEAT_RUNNING);
    cr_assert_lt(beat_oldest(BEAT_RUNNING).us, 3000);
    beat_mark(BEAT_PARKED);
    cr_assert_null(beat_oldest(BEAT_RUNNING).name, "who waits does not hang");
    beat_leave();
}

Test(beat, a_thread_that_nobody_watches_may_mark)
{
    beat_mark(BEAT_RUNNING);
    beat_leave();
    cr_assert_null(beat_oldest(BEAT_RUNNING).name);
}

Test(beat, names_the_thread_that_has_been_at_it_longest)
{
    enum beat_state s = BEAT_RUNNING;
    pthread_t t;
    kvs_err err;

    (void)sem_init(&marked, 0, 0);
    (void)sem_init(&go, 0, 0);
    cr_assert_eq(thread_start(&t, "a", in_a_call, &s, &err), KVS_OK);
    (void)sem_wait(&marked);
    wait_us(1000);
    cr_assert(beat_join("younger"));
    cr_assert_str_eq(beat_oldest(BEAT_RUNNING).name, "thread-a");
    (void)sem_post(&go);
    (void)pthread_join(t, NULL);
    cr_assert_str_eq(beat_oldest(BEAT_RUNNING).name, "younger");
    beat_leave();
}
