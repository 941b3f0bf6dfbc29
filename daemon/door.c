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

const char *door_refuses(const config *c, door d, uid_t uid, uid_t overflow_uid, char *ret_text, size_t cap)
{
    if (d.is_admin && uid != 0 && uid != geteuid()) {
        (void)snprintf(ret_text, cap, "uid %u: the admin socket is for root and for uid %u, the daemon's own",
                       (unsigned)uid, (unsigned)geteuid());
        return "uid";
    }
    if (uid == overflow_uid && uid != geteuid()) {
        (void)snprintf(ret_text, cap, "your user is not known in the daemon's user namespace");
        return "unmapped_uid";
    }
    if (!d.is_admin && tenant_is_gone(c, d.tenant)) {
        (void)snprintf(ret_text, cap, "tenant %s of this socket was removed from the configuration",
                       tenant_name(c, d.tenant));
        return "tenant_removed";
    }
    if (!d.is_admin && !tenant_lets_in(c, d.tenant, uid)) {
        (void)snprintf(ret_text, cap, "uid %u is not in tenants.%s.uids", (unsigned)uid, tenant_name(c, d.tenant));
        return "uid";
    }
    return NULL;
}
