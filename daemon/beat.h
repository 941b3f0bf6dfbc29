#ifndef KVS_DAEMON_BEAT_H
#define KVS_DAEMON_BEAT_H

/* Beat: what each thread beside the loop is at, so that a hang of ours can be told from one of the hardware.
 *
 *   parked    waits for work on a condition
 *   running   our own code, which must come to an end: past a limit it is a fault that only a restart mends
 *   in a call of a device, a driver or a tier, which may take as long as the hardware does: past a limit it is
 *             degraded health, and a restart would only lose what the call still reads
 *
 * Knows names and times.  Does not know what the threads do or what follows from a hang.
 * Threads: beat_join, beat_leave and the marks on the thread itself; beat_oldest on any.  A thread that never joined
 * may mark: nothing happens.
 * Owns a table of BEAT_MAX places; names are literals. */

#include <stdbool.h>
#include <stdint.h>

enum { BEAT_MAX = 64 };

enum beat_state { BEAT_PARKED, BEAT_RUNNING, BEAT_IN_CALL };

/* From now on the calling thread is running.  False: the table is full, and nobody watches this thread. */
bool beat_join(const char *name);
void beat_leave(void);

void beat_mark(enum beat_state s); /* also a sign of life: the time in the state begins anew */

typedef struct beat_age {
    const char *name; /* NULL: no thread is in that state */
    uint64_t us;      /* since it has marked it */
} beat_age;

beat_age beat_oldest(enum beat_state s);

#endif
