#include "daemon/door.h"

#include <stdio.h>
#include <unistd.h>

#include "daemon/tenant.h"

uid_t door_overflow_uid(void)
{
    FILE *f = fopen("/proc/sys/kernel/overflowuid", "re");
    unsigned uid = 65534;

    if (f != NULL) {
        if (fscanf(f, "%u", &uid) != 1)
            uid = 65534;
        (void)fclose(f);
    }
    return (uid_t)uid;
}

const char *door_refuses(const config *c, door d, uid_t uid, uid_t overflow_uid, const char **ret_text)
{
    if (d.is_admin && uid != 0 && uid != geteuid()) {
        *ret_text = "the admin socket is for root and for the user that the daemon runs as";
        return "uid";
    }
    if (uid == overflow_uid && uid != geteuid()) {
        *ret_text = "your user is not known in the daemon's user namespace";
        return "unmapped_uid";
    }
    if (!d.is_admin && tenant_is_gone(c, d.tenant)) {
        *ret_text = "the tenant of this socket was removed from the configuration";
        return "tenant_removed";
    }
    if (!d.is_admin && !tenant_lets_in(c, d.tenant, uid)) {
        *ret_text = "your user is not among the tenant's uids";
        return "uid";
    }
    return NULL;
}
