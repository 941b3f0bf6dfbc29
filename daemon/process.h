#ifndef KVS_DAEMON_PROCESS_H
#define KVS_DAEMON_PROCESS_H

/* Process: what the kernel has to be told of this process, or asked, at its start.
 *
 * Knows descriptors, limits, the C library's memory.  Does not know the daemon's parts.  Before there are threads, but for
 * the two checks and the number of descriptors, which only read and log. */

#include <stdbool.h>
#include <stdint.h>

#include "config/config.h"

void process_raise_fds(void); /* as many descriptors as are allowed */
/* What is kept for clients stays below: the operator, metrics and files need some, too. */
uint32_t process_client_fds(void);
void process_keep_memory(void);                 /* freed memory stays for the next request */
bool process_logs_to_journal(void);             /* stderr is the journal's stream */
void process_check_lock_limit(const config *c); /* raises RLIMIT_MEMLOCK; warns if it is below the pool */
void process_check_memory(const config *c);     /* warns if the pool is above what machine or control group have */

#endif
