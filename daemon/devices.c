#include "daemon/devices.h"

#include <string.h>

#include "daemon/log.h"
#include "daemon/process.h"
#include "kernels/device_cuda.h"

static void log_device(const device *d)
{
    device_about about = {0};
    char text[2 * sizeof about.name];

    d->ops->about(d, &about);
    log_event(LOG_LEVEL_INFO, "device", " kind=%s name=%s bytes=%llu idle_bytes=%llu numa_node=%d", d->ops->name,
              log_quote(text, sizeof text, about.name, strlen(about.name)), (unsigned long long)about.total_bytes,
              (unsigned long long)about.idle_bytes, (int)about.numa_node);
}

/* Every GPU that this process sees (CUDA_VISIBLE_DEVICES chooses).  One that cannot be used is left out, unless the
 * configuration insists on GPUs. */
static kvs_status open_gpus(devices *a, bool insists, kvs_err *err)
{
    char text[2 * KVS_ERR_MSG_BYTES];
    uint32_t n = 0;
    kvs_status s = device_cuda_count(&n, err);

    for (uint32_t i = 0; i < n && s == KVS_OK && a->n < WIRE_MAX_DEVICES; i++) {
        device **d = &a->dev[a->n];

        s = device_cuda_open(d, i, err);
        if (s == KVS_OK) {
            log_device(*d);
            a->n++;
        } else if (!insists && (i + 1 < n || a->n > 0)) {
            log_event(LOG_LEVEL_WARN, "device_left_out", " ordinal=%u reason=%s", i,
                      log_quote(text, sizeof text, err->msg, strlen(err->msg)));
            s = KVS_OK;
        }
    }
    return s;
}

kvs_status devices_open(devices *a, const config *c, kvs_err *err)
{
    bool insists = strcmp(c->device_kind, "cuda") == 0;
    char text[2 * KVS_ERR_MSG_BYTES];
    kvs_err why = {0};
    kvs_status s;

    if (strcmp(c->device_kind, "cpu") != 0) {
        s = open_gpus(a, insists, &why);
        if (s == KVS_OK) {
            process_check_lock_limit(c);
            return s;
        }
        if (insists) /* a machine may have its driver at a later start */
            return kvs_fail(err, KVS_E_SYS, "device.kind: cuda: %s", why.msg);
        log_event(LOG_LEVEL_INFO, "device", " kind=cpu reason=%s",
                  log_quote(text, sizeof text, why.msg, strlen(why.msg)));
    }
    s = device_cpu_open(&a->dev[0], err);
    a->n = s == KVS_OK;
    return s;
}

void devices_close(devices *a)
{
    while (a->n > 0) {
        a->n--;
        a->dev[a->n]->ops->close(a->dev[a->n]);
    }
}
