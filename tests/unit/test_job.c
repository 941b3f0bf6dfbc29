#include "daemon/job.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdalign.h>
#include <string.h>

static alignas(4096) uint8_t page[WIRE_COUNTER_PAGE_BYTES];

static uint64_t word(uint32_t at)
{
    uint64_t v;

    memcpy(&v, page + at, sizeof v);
    return v;
}

static void put(uint32_t at, uint64_t v)
{
    memcpy(page + at, &v, sizeof v);
}

static void on_done(work *w)
{
    (void)w;
}

static job fresh(void)
{
    job j;

    job_init(&j, on_done);
    j.counters = page;
    return j;
}

Test(job, starts_waiting_without_counters)
{
    job j = fresh();

    cr_assert_eq(atomic_load(&j.state), JOB_WAITING);
    cr_assert_eq(j.work.on_done, on_done);
    cr_assert_eq(j.after_counter, WIRE_NONE32);
    cr_assert_eq(j.signal_counter, WIRE_NONE32);
    cr_assert(job_is_due(&j));
    job_signal(&j, KVS_E_DEVICE);
    for (uint32_t at = 0; at < sizeof page; at += 8)
        cr_assert_eq(word(at), 0);
}

Test(job, is_due_when_the_clients_counter_reaches_the_value)
{
    job j = fresh();

    j.after_counter = 255;
    j.after_value = 7;
    put(255 * 16, 6);
    cr_assert_not(job_is_due(&j));
    put(255 * 16, 7);
    cr_assert(job_is_due(&j));
    put(255 * 16, UINT64_MAX);
    cr_assert(job_is_due(&j));
}

Test(job, waits_for_the_daemons_half_where_the_id_says_so)
{
    job j = fresh();

    j.after_counter = 3 | WIRE_COUNTER_DAEMON;
    j.after_value = 1;
    put(3 * 16, 9);
    cr_assert_not(job_is_due(&j), "the client's half was read");
    put(4096 + 3 * 16, 1);
    cr_assert(job_is_due(&j));
}

Test(job, stays_inside_the_page_whatever_the_id)
{
    job j = fresh();

    j.after_counter = 0x7fffff05;
    j.after_value = 1;
    cr_assert_not(job_is_due(&j));
    put(5 * 16, 1);
    cr_assert(job_is_due(&j));
}

Test(job, is_due_without_a_page)
{
    job j = fresh();

    j.counters = NULL;
    j.after_counter = j.signal_counter = 1;
    j.after_value = 5;
    cr_assert(job_is_due(&j));
    job_signal(&j, KVS_OK);
    cr_assert_not(j.signalled);
}

Test(job, is_either_claimed_or_dropped)
{
    job a = fresh(), b = fresh();

    cr_assert(job_claim(&a));
    cr_assert_not(job_drop(&a));
    cr_assert_eq(atomic_load(&a.state), JOB_RUNNING);
    cr_assert(job_drop(&b));
    cr_assert(job_drop(&b), "a second drop says the same");
    cr_assert_not(job_claim(&b));
    cr_assert_eq(atomic_load(&b.state), JOB_DROPPED);
}

Test(job, signals_the_daemons_half_once)
{
    job j = fresh();

    j.signal_counter = 2;
    j.signal_value = 40;
    job_signal(&j, KVS_OK);
    cr_assert(j.signalled);
    cr_assert_eq(word(4096 + 32), 40);
    cr_assert_eq(word(4096 + 32 + 8), 0);
    job_signal(&j, KVS_E_DEVICE);
    cr_assert_eq(word(4096 + 32 + 8), 0, "a second signal wrote the error word");
}

Test(job, writes_the_error_word_of_a_failure)
{
    job j = fresh();

    j.signal_counter = 0;
    j.signal_value = 1;
    job_signal(&j, KVS_E_CORRUPT);
    cr_assert_eq(word(4096), 1);
    cr_assert_eq(word(4096 + 8), KVS_E_CORRUPT);
}

Test(job, never_lowers_a_counter)
{
    job j = fresh();

    put(4096, 50);
    j.signal_counter = 0;
    j.signal_value = 49;
    job_signal(&j, KVS_E_DEVICE);
    cr_assert_eq(word(4096), 50);
    cr_assert_eq(word(4096 + 8), KVS_E_DEVICE, "the failure is said all the same");
}

static void *signal_many(void *arg)
{
    for (uint64_t v = (uint64_t)(uintptr_t)arg; v <= 20000; v += 4) {
        job j = fresh();

        j.signal_counter = 9;
        j.signal_value = v;
        job_signal(&j, KVS_OK);
        if (word(4096 + 144) < v)
            return arg;
    }
    return NULL;
}

Test(job, keeps_the_largest_of_concurrent_signals)
{
    pthread_t t[4];

    for (uintptr_t i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&t[i], NULL, signal_many, (void *)(i + 1)), 0);
    for (int i = 0; i < 4; i++) {
        void *lowered;

        pthread_join(t[i], &lowered);
        cr_assert_null(lowered, "a counter fell below a value that had been signalled");
    }
    cr_assert_eq(word(4096 + 144), 20000);
}

static kvs_status worst(kvs_status a, kvs_status b)
{
    job j = fresh();

    job_note(&j, a, NULL);
    job_note(&j, b, NULL);
    return j.status;
}

Test(job, keeps_the_worst_status)
{
    cr_assert_eq(worst(KVS_OK, KVS_OK), KVS_OK);
    cr_assert_eq(worst(KVS_E_CANCELLED, KVS_OK), KVS_E_CANCELLED);
    cr_assert_eq(worst(KVS_E_CORRUPT, KVS_E_CANCELLED), KVS_E_CORRUPT);
    cr_assert_eq(worst(KVS_E_CORRUPT, KVS_E_DEVICE), KVS_E_DEVICE);
    cr_assert_eq(worst(KVS_E_DEVICE_LOST, KVS_E_DEVICE), KVS_E_DEVICE_LOST);
}

Test(job, keeps_the_first_text)
{
    job j = fresh();
    kvs_err a = {KVS_E_CORRUPT, "first"}, b = {KVS_E_DEVICE, "second"};

    job_note(&j, KVS_OK, &b);
    cr_assert_eq(j.err.status, KVS_OK);
    job_note(&j, KVS_E_CORRUPT, &a);
    job_note(&j, KVS_E_DEVICE, &b);
    cr_assert_str_eq(j.err.msg, "first");
    cr_assert_eq(j.status, KVS_E_DEVICE);
}
