#include "proto/std_fds.h"

#include <fcntl.h>

void std_fds_fill(void)
{
    static const int HOW[] = {O_RDONLY, O_RDONLY, O_WRONLY}; /* of the second: not for writing, see the header */

    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)open("/dev/null", HOW[fd] | O_CLOEXEC); /* the lowest that is free: this one */
}
