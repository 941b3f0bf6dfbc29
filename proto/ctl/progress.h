#ifndef KVS_CTL_PROGRESS_H
#define KVS_CTL_PROGRESS_H

/* A progress line on standard error, rewritten in place; silent unless that is a terminal.  One thread. */

#include <stdbool.h>
#include <stdint.h>

bool progress_wanted(bool quiet);
/* "what: 1234 of 12031 (10 %)"; at most ten a second are drawn. */
void progress_show(const char *what, uint64_t done, uint64_t of);
void progress_end(void); /* clears the line */

#endif
