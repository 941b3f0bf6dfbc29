#include "daemon/calibration.h"

#include <stdio.h>
#include <string.h>

static kvs_status check(const copy_table *t, const device_about *about, kvs_err *err)
{
    if (strcmp(t->card, about->name) != 0)
        return kvs_fail(err, KVS_E_STATE, "measured on %s, this is %s", t->card, about->name);
    if (t->driver_version != about->driver_version)
        return kvs_fail(err, KVS_E_STATE, "measured with driver version %u, this is %u", (unsigned)t->driver_version,
                        (unsigned)about->driver_version);
    return KVS_OK;
}

void calibration_read(calibration *ret, const config *c, const device *d)
{
    device_about about = {0};
    kvs_err err = {.msg = ""};
    kvs_status s;

    *ret = (calibration){.is_measured = false};
    if (!d->ops->copies_by_kernel)
        return;
    if (d->ops->about != NULL)
        d->ops->about(d, &about);
    s = copy_table_read(c->mover_calibration, about.uuid, &ret->table, &err);
    if (s == KVS_OK)
        s = check(&ret->table, &about, &err);
    ret->is_measured = s == KVS_OK;
    if (s != KVS_OK)
        (void)snprintf(ret->why, sizeof ret->why, "%s", err.msg);
}

const char *calibration_source(const calibration *x, const config *c, const device *d)
{
    if (!d->ops->copies_by_kernel)
        return "device";
    if (strcmp(c->mover_path, "auto") != 0)
        return "configuration";
    return x->is_measured ? "table" : "defaults";
}
