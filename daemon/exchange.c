#include "daemon/exchange.h"

#include <string.h>

/* Below this the copy between the devices takes a third of the time or more that half a load does: what is gained is soon lost to
 * waiting for each other. */
#define WORTH_IT 2.0

static double measured(exchange_end own, exchange_end other)
{
    return own.calibration->is_measured ? copy_table_peer(&own.calibration->table, other.about->uuid) : 0;
}

static bool is_gain(exchange_end own, exchange_end other)
{
    double link = own.calibration->is_measured ? copy_table_link(&own.calibration->table) : 0;

    return link > 0 && measured(own, other) >= WORTH_IT * link;
}

static const char *unwanted(const config *c, exchange_end own, exchange_end other)
{
    if (strcmp(c->mover_exchange, "off") == 0)
        return "configuration";
    if (strcmp(c->mover_exchange, "on") == 0)
        return "";
    if (measured(own, other) <= 0 || measured(other, own) <= 0)
        return "not measured: kvstridectl calibrate";
    return is_gain(own, other) && is_gain(other, own) ? "" : "no gain";
}

bool exchange_is_wanted(const config *c, exchange_end own, exchange_end other)
{
    return unwanted(c, own, other)[0] == '\0';
}

static const char *obstacle(const config *c, exchange_end own, exchange_end other, exchange_reach reach)
{
    const char *why = unwanted(c, own, other);

    if (why[0] != '\0' || reach == EXCHANGE_REACH)
        return why;
    return reach == EXCHANGE_NOT_ASKED ? "takes a restart" : "no access to each other's memory";
}

void exchange_decide(exchange *ret, const config *c, exchange_end own, exchange_end other, exchange_reach reach)
{
    *ret = (exchange){.gbs = measured(own, other), .why = obstacle(c, own, other, reach)};
    ret->on = ret->why[0] == '\0';
}
