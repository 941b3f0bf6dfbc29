#include "daemon/job.h"

#include <stddef.h>

/* The page is shared with another process: only address-free atomics are of use there. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics need a lock here");
_Static_assert(ATOMIC_BOOL_LOCK_FREE == 2 && sizeof(_Atomic bool) == sizeof(bool),
               "an atomic flag is more than a flag");

enum {
    ENTRY_BYTES = 16,
    ERROR_WORD = 8,
    /* A compare-exchange fails when someone else wrote in between.  Our own threads do that a handful of
     * times; only a client that scribbles over its page gets here, and it may not keep a worker busy. */
    ADVANCE_TRIES = 64,
};

/* Entry `index` of the client's or the daemon's half.  The mask holds the address inside the page even if a
 * check at admission were missing. */
static _Atomic uint64_t *counter_cell(uint8_t *page, bool daemon_half, uint32_t index, uint32_t word)
{
    size_t at = (size_t)(index & (WIRE_COUNTERS - 1)) * ENTRY_BYTES + word;

    return (_Atomic uint64_t *)(void *)(page + (daemon_half ? WIRE_COUNTER_HALF_BYTES : 0) + at);
}

void job_init(job *j, void (*on_done)(work *w))
{
    *j = (job){.work = {.next = NULL, .on_done = on_done},
               .state = JOB_WAITING,
               .after_counter = WIRE_NONE32,
               .signal_counter = WIRE_NONE32};
}

bool job_is_due(const job *j)
{
    const _Atomic uint64_t *cell;

    if (j->after_counter == WIRE_NONE32 || j->counters == NULL)
        return true;
    cell = counter_cell(j->counters, (j->after_counter & WIRE_COUNTER_DAEMON) != 0, j->after_counter, 0);
    return atomic_load_explicit(cell, memory_order_acquire) >= j->after_value;
}

/* WAITING -> to, or what it was already. */
static enum job_state leave_waiting(job *j, enum job_state to)
{
    uint32_t seen = JOB_WAITING;

    if (atomic_compare_exchange_strong_explicit(&j->state, &seen, to, memory_order_acq_rel, memory_order_acquire))
        return to;
    return (enum job_state)seen;
}

bool job_drop(job *j)
{
    return leave_waiting(j, JOB_DROPPED) == JOB_DROPPED;
}

bool job_claim(job *j)
{
    return leave_waiting(j, JOB_RUNNING) == JOB_RUNNING;
}

const bool *job_stop_flag(const job *j)
{
    return (const bool *)(uintptr_t)&j->stop;
}

/* Jobs of several threads may signal one counter in any order, so the larger value stays. */
static void advance(_Atomic uint64_t *cell, uint64_t to)
{
    uint64_t seen = atomic_load_explicit(cell, memory_order_relaxed);

    for (int i = 0; i < ADVANCE_TRIES && seen < to; i++)
        if (atomic_compare_exchange_strong_explicit(cell, &seen, to, memory_order_release, memory_order_relaxed))
            return;
    if (seen < to)
        atomic_store_explicit(cell, to, memory_order_release);
}

void job_signal(job *j, kvs_status status)
{
    if (j->signalled || j->signal_counter == WIRE_NONE32 || j->counters == NULL)
        return;
    j->signalled = true;
    if (status != KVS_OK)
        atomic_store_explicit(counter_cell(j->counters, true, j->signal_counter, ERROR_WORD), (uint64_t)status,
                              memory_order_release);
    advance(counter_cell(j->counters, true, j->signal_counter, 0), j->signal_value);
}

/* Which of two failures a reply should name: a lost device ends the process, a cancelled rest is the mildest.
 */
static int severity(kvs_status s)
{
    switch (s) {
    case KVS_OK:
        return 0;
    case KVS_E_CANCELLED:
        return 1;
    case KVS_E_DEVICE:
        return 3;
    case KVS_E_DEVICE_LOST:
        return 4;
    default:
        return 2;
    }
}

void job_note(job *j, kvs_status s, const kvs_err *err)
{
    if (s == KVS_OK)
        return;
    if (j->err.status == KVS_OK && err != NULL)
        j->err = *err;
    if (severity(s) > severity(j->status))
        j->status = s;
}
