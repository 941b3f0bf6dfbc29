/* Links: what configuration and calibration make of the ways between the devices and the host, and between devices. */
#include <string.h>

#include "daemon/core.h"
#include "daemon/log.h"

void core_share_link(const core *c, uint32_t tenant, uint32_t share)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        mover_share(c->devices[i].load, tenant, share);
        mover_share(c->devices[i].store, tenant, share);
        decoder_share(c->devices[i].decoder, tenant, share);
    }
}

void core_present(core *c, uint32_t by)
{
    c->n_present += by;
    for (uint32_t i = 0; i < c->n_devices && !c->stopped; i++) {
        mover_alone(c->devices[i].load, c->n_present < 2);
        mover_alone(c->devices[i].store, c->n_present < 2);
    }
}

/* What the configuration and the card's table say of copies. */
static void set_mover(const core *c, const core_device *d, int dir)
{
    const copy_table *table = d->calibration.is_measured ? &d->calibration.table : NULL;
    mover_settings s = {.batch_bytes = (uint64_t)c->config->mover_batch_bytes,
                        .sums_us = strcmp(c->config->mover_sums, "auto") == 0 ? ROUTE_SUMS_US : 0};

    route_rules_make(&s.rules, c->config, table, dir, d->dev->ops->copies_by_kernel);
    mover_set(dir == 0 ? d->load : d->store, &s);
}

static exchange_end end_of(const core *c, uint32_t i)
{
    return (exchange_end){&c->devices[i].calibration, &c->devices[i].about};
}

/* Which devices may load the same blocks together. */
static void set_exchanges(core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        c->may_exchange[i] = false;
        for (uint32_t j = 0; j < c->n_devices; j++) {
            if (i == j)
                continue;
            exchange_decide(&c->exchanges[i][j], c->config, end_of(c, i), end_of(c, j), c->reach[i][j]);
            c->may_exchange[i] = c->may_exchange[i] || c->exchanges[i][j].on;
        }
    }
}

/* Both ways or not at all. */
static exchange_reach introduce(device *a, device *b)
{
    bool reach = a->ops->reaches && a->ops->reaches(a, b) && b->ops->reaches && b->ops->reaches(b, a);

    return reach ? EXCHANGE_REACH : EXCHANGE_OUT_OF_REACH;
}

/* Before any memory is made. */
void core_introduce_devices(core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++)
        calibration_read(&c->devices[i].calibration, c->config, c->devices[i].dev);
    for (uint32_t i = 0; i < c->n_devices; i++)
        for (uint32_t j = i + 1; j < c->n_devices; j++)
            if (exchange_is_wanted(c->config, end_of(c, i), end_of(c, j)))
                c->reach[i][j] = c->reach[j][i] = introduce(c->devices[i].dev, c->devices[j].dev);
}

void core_set_movers(core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        calibration_read(&c->devices[i].calibration, c->config, c->devices[i].dev);
        set_mover(c, &c->devices[i], 0);
        set_mover(c, &c->devices[i], 1);
    }
    set_exchanges(c);
}

static void log_exchanges(const core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++)
        for (uint32_t j = i + 1; j < c->n_devices; j++)
            log_event(LOG_LEVEL_INFO, "exchange", " devices=%s,%s on=%d gbs=%.1f,%.1f reason=\"%s\"",
                      c->devices[i].name, c->devices[j].name, c->exchanges[i][j].on, c->exchanges[i][j].gbs,
                      c->exchanges[j][i].gbs, c->exchanges[i][j].why);
}

static void log_calibration(const core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        const core_device *d = &c->devices[i];
        const calibration *x = &d->calibration;
        char why[2 * KVS_ERR_MSG_BYTES];

        if (d->dev->ops->copies_by_kernel)
            log_event(LOG_LEVEL_INFO, "calibration", " device=%s decides=%s date=%s reason=%s", d->name,
                      calibration_source(x, c->config, d->dev), x->is_measured ? x->table.date : "-",
                      log_quote(why, sizeof(why), x->why, strlen(x->why)));
    }
}

void core_log_links(const core *c)
{
    log_calibration(c);
    log_exchanges(c);
}
