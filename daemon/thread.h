#ifndef KVS_DAEMON_THREAD_H
#define KVS_DAEMON_THREAD_H

/* Threads that are not the loop: how they start, and the clock they wait by.
 *
 * Knows pthreads.  Does not know what a thread does.  Any thread may call.  The caller owns the pthread_t and
 * joins it. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

uint64_t thread_now_us(void); /* monotonic */
uint64_t thread_now_ns(void);

/* In a loop that waits without sleeping: let the processor's other thread go on. */
static inline void thread_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Are there processors enough, for this process, that a thread may wait without sleeping for a moment?  Elsewhere it would only keep away whom
 * it waits for. */
bool thread_may_spin(void);

/* This thread's timers go off when they are due, and not up to 50 us later for the sake of fewer wake-ups. */
void thread_exact_timers(void);

/* A condition whose timed wait counts on the monotonic clock: a clock that is set does not stall a worker. */
int thread_cond_init(pthread_cond_t *c);
/* Wait at most `us`.  `m` is held; early returns happen. */
void thread_cond_wait_us(pthread_cond_t *c, pthread_mutex_t *m, uint64_t us);

/* Start `fn(arg)` under a name of at most 15 bytes, all signals blocked but for its own faults: they belong to the loop. */
kvs_status thread_start(pthread_t *ret, const char *name, void *(*fn)(void *), void *arg, kvs_err *err);

#endif
