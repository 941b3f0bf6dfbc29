/* kvstrided: puts the parts together, obeys signals, and takes the parts apart.
 *
 *   STARTING --first memory usable--> SERVING --TERM, INT, device lost--> DRAINING --idle, or its time is
 * up--> CLOSING (clients are taken down) --nothing of them is left--> STOPPED
 *
 * A second TERM ends DRAINING at once, a third one CLOSING. */

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "config/json.h"
#include "daemon/accepted.h"
#include "daemon/beat.h"
#include "daemon/board.h"
#include "daemon/conn.h"
#include "daemon/devices.h"
#include "daemon/http.h"
#include "daemon/log.h"
#include "daemon/mailbox.h"
#include "daemon/notify.h"
#include "daemon/options.h"
#include "daemon/process.h"
#include "daemon/report.h"
#include "daemon/request.h"
#include "daemon/server.h"
#include "proto/std_fds.h"
#include "proto/text.h"

enum { CLOSE_LIMIT_MS = 5000, KEY_LIST_BYTES = 1024, NOTE_BYTES = KVS_ERR_MSG_BYTES + 32, HEARTBEAT_MS = 2000 };

enum app_state { STARTING, SERVING, DRAINING, CLOSING, STOPPED };

typedef struct app {
    options options;
    config config; /* live: core and server read it through a pointer, a reload changes it */
    enum app_state state;
    int exit_code;
    bool torn; /* ended before everything was taken down: nothing may be freed any more */
    uv_loop_t loop;
    uv_signal_t signals[3];
    uv_timer_t limit;        /* of DRAINING and CLOSING */
    uv_timer_t notify_again; /* while the service manager does not read */
    uv_timer_t heartbeat;    /* an idle loop turns too, so that one that does not turn is not taken for idle */
    uv_timer_t watchdog;
    uint64_t watchdog_us; /* what the service manager allows between two signs of life; 0: it does not ask */
    notify notify;
    report report;
    bool grows;            /* the arena has not its full size yet, or may have got another one to reach */
    bool old_config;       /* the file was refused, and is not mended yet */
    bool keep_due;         /* the values in use are not in the accepted copy yet: see keep_config */
    int64_t proven_bytes;  /* the pool.max_bytes that it was started with, or has reached since */
    char note[NOTE_BYTES]; /* what is wrong with the file; "": nothing */
    bool has_signals;
    persist memory; /* the pool's */
    devices devices;
    mailbox *mailbox;
    server *server;
    core *core;
    metrics_edge edge;
    board *board; /* NULL: no metrics */
    http *http;
    bool has_port; /* http serves metrics.port too */
} app;

static void log_failure(const char *event, const kvs_err *err)
{
    char text[2 * KVS_ERR_MSG_BYTES];

    log_event(LOG_LEVEL_ERROR, event, " status=%s msg=%s", kvs_status_name(err->status),
              log_quote(text, sizeof text, err->msg, strlen(err->msg)));
}

static enum log_level level_of(const char *word)
{
    switch (word[0]) {
    case 'e':
        return LOG_LEVEL_ERROR;
    case 'w':
        return LOG_LEVEL_WARN;
    case 'd':
        return LOG_LEVEL_DEBUG;
    default:
        return LOG_LEVEL_INFO;
    }
}

static void on_notify_again(uv_timer_t *t)
{
    app *a = t->data;

    if (!notify_retry(&a->notify))
        (void)uv_timer_stop(t);
}

static void retry_notify(app *a)
{
    if (notify_retry(&a->notify))
        (void)uv_timer_start(&a->notify_again, on_notify_again, NOTIFY_RETRY_MS, NOTIFY_RETRY_MS);
}

/* ---- what the service manager is told ---- */
/* True: a line is due, and in a->report. */
static bool report_is_due(app *a)
{
    report_facts f = {.note = a->note};

    (void)core_get_growth(a->core, &f.usable_bytes, &f.max_bytes);
    f.health = core_health(a->core, &f.reasons);
    return report_update(&a->report, &f, conn_now_us());
}

/* What a start came up with, or what the pool has grown to, is what to fall back on.  With a size that is not reached, or
 * never is, the next start might not come up: until then the copy stays as it is, whole, for values fit each other. */
static void keep_config(app *a)
{
    kvs_err err = {0};

    if (!a->keep_due || a->state != SERVING || (a->config.pool_max_bytes != a->proven_bytes && !core_has_size(a->core)))
        return;
    a->keep_due = false;
    a->proven_bytes = a->config.pool_max_bytes;
    if (!a->old_config && accepted_save(&a->options, &a->config, &err) != KVS_OK)
        log_failure("accepted_config_not_kept", &err);
}

/* Looked at in each turn while the arena grows, and not again: a turn is too short for it. */
static void tell_growth(app *a)
{
    uint64_t usable, max;

    a->grows = core_get_growth(a->core, &usable, &max);
    if (!a->grows)
        keep_config(a);
    if (report_is_due(a))
        notify_status(&a->notify, a->report.line);
}

static void tell_ready(app *a)
{
    a->grows = true;
    (void)report_is_due(a);
    notify_ready(&a->notify, a->report.line);
    retry_notify(a);
}

/* The loop turns, or this would not run.  A thread of ours that hangs in our own code is as bad as a loop that stands:
 * then the manager hears nothing, and ends it.  One inside a call of the device is not: see core_health. */
static void on_watchdog(uv_timer_t *t)
{
    app *a = t->data;
    beat_age hung = beat_oldest(BEAT_RUNNING);

    if (hung.us > a->watchdog_us / 2)
        log_event(LOG_LEVEL_ERROR, "thread_hung", " thread=%s for_ms=%llu msg=\"no more signs of life\"", hung.name,
                  (unsigned long long)hung.us / 1000);
    else
        notify_alive(&a->notify);
    if (a->state == SERVING && report_is_due(a))
        notify_status(&a->notify, a->report.line);
}

static void start_watchdog(app *a)
{
    uint64_t every_ms;

    (void)uv_timer_init(&a->loop, &a->watchdog);
    a->watchdog.data = a;
    a->watchdog_us = notify_watchdog_us();
    every_ms = a->watchdog_us / 3000;
    if (a->watchdog_us > 0)
        (void)uv_timer_start(&a->watchdog, on_watchdog, 0, every_ms > 0 ? every_ms : 1);
}

/* Would another start with the same configuration end the same way? */
static int exit_code_of(kvs_status s)
{
    switch (s) {
    case KVS_E_BUSY:
        return EXIT_CODE_BUSY;
    case KVS_E_CONFIG:
    case KVS_E_LIMIT:
    case KVS_E_INVALID:
    case KVS_E_EXISTS:
    case KVS_E_UNSUPPORTED:
        return EXIT_CODE_CONFIG;
    case KVS_E_DEVICE_LOST:
        return EXIT_CODE_DEVICE;
    default:
        return EXIT_CODE_SYSTEM;
    }
}

/* The exit code of a start that failed.  If the file's values are not those that are known to work, the next start does
 * not use them: then another one is worth it, whatever the reason. */
static int start_failed(const app *a, const kvs_err *err)
{
    log_failure("start_failed", err);
    if (a->old_config || err->status == KVS_E_BUSY || err->status == KVS_E_DEVICE_LOST ||
        !accepted_failed(&a->options, &a->config, err))
        return exit_code_of(err->status);
    log_event(LOG_LEVEL_ERROR, "config_put_aside",
              " file=%s msg=\"the next start runs the last accepted configuration, until the file is another one\"",
              a->options.config_path);
    return EXIT_CODE_SYSTEM;
}

/* ---- states ---- */
static void begin_close(app *a)
{
    a->state = CLOSING;
    server_close_clients(a->server);
    (void)uv_timer_stop(&a->limit);
}

static void stop_torn(app *a)
{
    log_event(LOG_LEVEL_ERROR, "stop_forced", " exit=%d", EXIT_CODE_DEVICE);
    a->exit_code = EXIT_CODE_DEVICE;
    a->torn = true;
    a->state = STOPPED;
    uv_stop(&a->loop);
}

static void on_limit(uv_timer_t *t)
{
    app *a = t->data;

    if (a->state == DRAINING) {
        log_event(LOG_LEVEL_WARN, "drain_timeout", " timeout_ms=%lld", (long long)a->config.drain_timeout_ms);
        begin_close(a);
        (void)uv_timer_start(&a->limit, on_limit, CLOSE_LIMIT_MS, 0);
    } else if (a->state == CLOSING) {
        stop_torn(a); /* a copy that the hardware does not end */
    }
}

static void begin_drain(app *a, const char *why)
{
    log_event(LOG_LEVEL_INFO, "draining", " reason=%s timeout_ms=%lld", why, (long long)a->config.drain_timeout_ms);
    a->state = DRAINING;
    notify_stopping(&a->notify, "stopping: copies in flight are finishing");
    retry_notify(a);
    server_stop_listening(a->server);
    core_drain(a->core);
    (void)uv_timer_start(&a->limit, on_limit, (uint64_t)a->config.drain_timeout_ms, 0);
}

static void become_ready(app *a)
{
    char port[16] = "-";

    a->state = SERVING;
    tell_ready(a);
    a->keep_due = true;
    keep_config(a);
    if (a->http != NULL && a->has_port)
        (void)snprintf(port, sizeof port, "%lld", (long long)a->config.metrics_port);
    log_event(LOG_LEVEL_INFO, "ready", " socket=%s admin=%s metrics=%s metrics_port=%s", a->config.socket_path,
              a->config.admin_path, a->http != NULL ? a->config.metrics_path : "-", port);
}

/* Once each turn of the loop: has something happened that changes the state? */
static void on_turn(void *ud)
{
    app *a = ud;
    kvs_err err;

    if (a->board != NULL)
        board_turned(a->board, conn_now_us());
    if (a->exit_code == EXIT_CODE_OK && core_lost(a->core) != KVS_OK) {
        a->exit_code = EXIT_CODE_DEVICE; /* the core has logged it */
        if (a->state < DRAINING)
            begin_drain(a, "device_lost");
    }
    if (a->state == STARTING && a->exit_code == EXIT_CODE_OK && core_start_failure(a->core, &err) != KVS_OK) {
        a->exit_code = start_failed(a, &err);
        begin_drain(a, "start_failed");
    }
    if (a->state == STARTING && core_is_ready(a->core))
        become_ready(a);
    else if (a->state == SERVING && a->grows)
        tell_growth(a);
    if (a->state == DRAINING && core_is_idle(a->core) && server_is_flushed(a->server)) {
        begin_close(a);
        (void)uv_timer_start(&a->limit, on_limit, CLOSE_LIMIT_MS, 0);
    }
    if (a->state == CLOSING && server_is_empty(a->server)) {
        a->state = STOPPED;
        uv_stop(&a->loop);
    }
}

/* ---- metrics ---- */
static void fill_snapshot(void *ud, metrics_snapshot *s)
{
    const app *a = ud;

    metrics_fill(a->core, conn_now_us(), s);
}

static void on_heartbeat(uv_timer_t *t)
{
    http_check(((app *)t->data)->http, HTTP_WHOLE_US);
}

/* A cache that cannot be watched is better than none: one line says so. */
static void log_metrics(const char *event, const kvs_err *err, const char *more)
{
    char text[2 * KVS_ERR_MSG_BYTES];

    log_event(LOG_LEVEL_WARN, event, " status=%s msg=%s%s", kvs_status_name(err->status),
              log_quote(text, sizeof text, err->msg, strlen(err->msg)), more);
}

static void metrics_failed(app *a, const kvs_err *err)
{
    log_metrics("no_metrics", err, "");
    http_stop(a->http);
    a->http = NULL;
}

static void open_metrics(app *a)
{
    const config *c = &a->config;
    kvs_err err;

    if (!c->metrics_enabled)
        return;
    if (http_open(&a->http, c->metrics_path, (mode_t)c->metrics_mode, &err) != KVS_OK) {
        metrics_failed(a, &err);
        return;
    }
    a->has_port = c->metrics_port != 0;
    if (http_open_port(a->http, (uint16_t)c->metrics_port, &err) != KVS_OK) {
        a->has_port = false;
        log_metrics("no_metrics_port", &err, " hint=\"the UNIX socket serves them all the same\"");
    }
}

static void start_metrics(app *a)
{
    kvs_err err;

    if (a->http == NULL)
        return;
    if (board_create(&a->board, mailbox_sink(a->mailbox), fill_snapshot, a, &err) != KVS_OK ||
        http_start(a->http, a->board, &err) != KVS_OK) {
        metrics_failed(a, &err);
        return;
    }
    (void)uv_timer_start(&a->heartbeat, on_heartbeat, HEARTBEAT_MS, HEARTBEAT_MS);
}

static void stop_metrics(app *a)
{
    if (a->board != NULL)
        board_close(a->board);
    http_stop(a->http);
    a->http = NULL;
}

/* ---- signals ---- */
static void on_stop_signal(uv_signal_t *h, int signum)
{
    app *a = h->data;
    const char *name = signum == SIGTERM ? "SIGTERM" : "SIGINT";

    if (a->state < DRAINING) {
        begin_drain(a, name);
    } else if (a->state == DRAINING) {
        log_event(LOG_LEVEL_WARN, "drain_cut_short", " reason=%s", name);
        begin_close(a);
        (void)uv_timer_start(&a->limit, on_limit, CLOSE_LIMIT_MS, 0);
    } else if (a->state == CLOSING) {
        stop_torn(a);
    }
}

/* One list of the answer to RELOAD: the keys that apply at once, or those that wait for a restart. */
typedef struct change_list {
    json_writer *w;
    bool reloadable;
} change_list;

static void put_change(void *ud, const config_change *x)
{
    const change_list *l = ud;

    if (x->reloadable != l->reloadable)
        return;
    json_begin_object(l->w, NULL);
    json_put_string(l->w, "key", x->key);
    json_put_string(l->w, "from", x->from);
    json_put_string(l->w, "to", x->to);
    json_end(l->w);
}

static void put_changes(const app *a, const config *fresh, bool dry_run, json_writer *w)
{
    change_list now = {w, true}, later = {w, false};

    json_begin_object(w, NULL);
    json_put_string(w, "file", a->options.config_path);
    json_put_bool(w, "dry_run", dry_run);
    json_begin_array(w, "applied");
    (void)config_changed(&a->config, fresh, put_change, &now);
    json_end(w);
    json_begin_array(w, "needs_restart");
    (void)config_changed(&a->config, fresh, put_change, &later);
    json_end(w);
    json_end(w);
}

static void apply_config(app *a, const config *next, const char *changed, const char *kept)
{
    a->config = *next;
    a->old_config = false;
    a->grows = a->keep_due = true;
    a->note[0] = '\0';
    core_set_old_config(a->core, NULL);
    log_set_level(level_of(a->config.log_level));
    core_configured(a->core);
    server_configured(a->server);
    process_check_memory(&a->config);
    keep_config(a);
    log_event(LOG_LEVEL_INFO, "reloaded", " file=%s changed=%s needs_restart=%s", a->options.config_path,
              changed[0] != '\0' ? changed : "-", kept[0] != '\0' ? kept : "-");
}

/* `room`: the configuration in the file, and what it makes of the live one. */
static kvs_status reload_into(app *a, config *room, bool dry_run, json_writer *w, kvs_err *err)
{
    char changed[KEY_LIST_BYTES], kept[KEY_LIST_BYTES];
    kvs_status s = options_config(&a->options, &room[0], err);

    room[1] = a->config;
    if (s == KVS_OK)
        s = options_reload(&room[1], &room[0], changed, kept, KEY_LIST_BYTES, err);
    if (s == KVS_OK)
        s = core_check_config(a->core, &room[1], err);
    if (s == KVS_OK)
        s = server_prepare(a->server, &room[1], dry_run, err);
    if (s != KVS_OK)
        return s;
    if (w != NULL)
        put_changes(a, &room[0], dry_run, w);
    if (!dry_run)
        apply_config(a, &room[1], changed, kept);
    return KVS_OK;
}

static kvs_status reload(void *ud, bool dry_run, json_writer *w, kvs_err *err)
{
    app *a = ud;
    config *room = malloc(2 * sizeof *room);
    kvs_status s;

    if (a->options.config_path == NULL)
        s = kvs_fail(err, KVS_E_STATE,
                     "the daemon was started without a configuration file (--config): there is none to read again");
    else if (room == NULL)
        s = kvs_fail(err, KVS_E_NO_MEMORY, "reload: out of memory");
    else
        s = reload_into(a, room, dry_run, w, err);
    free(room);
    if (dry_run)
        return s;
    core_reloaded(a->core, s, err);
    metrics_count(&a->edge.reloads, s == KVS_OK ? "applied" : "refused", 1);
    if (s != KVS_OK) {
        log_failure("reload_refused", err);
        (void)snprintf(a->note, sizeof a->note, "reload refused: %s", err->msg);
    }
    if (a->state == SERVING && report_is_due(a))
        notify_status(&a->notify, a->report.line);
    return s;
}

static void on_reload_signal(uv_signal_t *h, int signum)
{
    app *a = h->data;
    kvs_err err = {0};

    (void)signum;
    if (a->state >= DRAINING || a->options.config_path == NULL) {
        metrics_count(&a->edge.reloads, "ignored", 1);
        log_event(LOG_LEVEL_INFO, "reload_ignored", " reason=%s", a->state >= DRAINING ? "stopping" : "no_config_file");
        return;
    }
    if (a->state == SERVING)
        notify_reloading(&a->notify);
    (void)reload(a, false, NULL, &err);
    if (a->state == SERVING) /* else it comes with the first memory */
        tell_ready(a);
}

/* From exec on, a hang-up or a stop waits for the loop and kills nobody; threads made later leave both to it.
 */
static void hold_signals(int how)
{
    sigset_t set;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGHUP);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    (void)pthread_sigmask(how, &set, NULL);
}

static void start_signals(app *a)
{
    static const int NUMBERS[] = {SIGTERM, SIGINT, SIGHUP};

    for (size_t i = 0; i < sizeof NUMBERS / sizeof NUMBERS[0]; i++) {
        (void)uv_signal_init(&a->loop, &a->signals[i]);
        a->signals[i].data = a;
        (void)uv_signal_start(&a->signals[i], NUMBERS[i] == SIGHUP ? on_reload_signal : on_stop_signal, NUMBERS[i]);
    }
    (void)uv_timer_init(&a->loop, &a->limit);
    (void)uv_timer_init(&a->loop, &a->notify_again);
    (void)uv_timer_init(&a->loop, &a->heartbeat);
    a->limit.data = a->notify_again.data = a->heartbeat.data = a;
    start_watchdog(a);
    a->has_signals = true;
    hold_signals(SIG_UNBLOCK);
}

/* ---- start ---- */
/* What an earlier life left, or new memory, which the service manager is given at once: from then on a kill loses nothing
 * that was acknowledged. */
static kvs_status open_memory(app *a, int arena, int table, kvs_err *err)
{
    char text[2 * KVS_ERR_MSG_BYTES];
    kvs_status s = persist_open(&a->memory, a->config.pool_path, arena, table, err);

    if (s != KVS_OK)
        return s;
    if (a->memory.note[0] != '\0')
        log_event(LOG_LEVEL_WARN, "memory_refused", " reason=%s",
                  log_quote(text, sizeof text, a->memory.note, strlen(a->memory.note)));
    if (a->config.pool_path[0] != '\0' && (arena >= 0 || table >= 0)) {
        notify_store(&a->notify, PERSIST_ARENA, -1);
        notify_store(&a->notify, PERSIST_TABLE, -1);
    }
    if (a->memory.made[0])
        notify_store(&a->notify, PERSIST_ARENA, a->memory.arena_fd);
    if (a->memory.made[1])
        notify_store(&a->notify, PERSIST_TABLE, a->memory.table_fd);
    return KVS_OK;
}

static kvs_status open_server(app *a, kvs_err *err)
{
    const char *names[CONFIG_MAX_TENANTS + 1] = {"admin", "client"}; /* the rest: tenants 1 and up by their names */
    int fds[CONFIG_MAX_TENANTS + 1];
    server_config c = {.loop = &a->loop, .config = &a->config, .edge = &a->edge, .on_turn = on_turn, .ud = a};
    unsigned strangers;

    for (uint32_t t = 1; t < a->config.n_tenants; t++)
        names[t + 1] = a->config.tenants[t].name;
    notify_sockets(names, fds, a->config.n_tenants + 1, &strangers);
    if (strangers > 0)
        log_event(LOG_LEVEL_WARN, "descriptors_closed",
                  " n=%u msg=\"passed under other names than admin, client and tenants\"", strangers);
    c.admin_fd = fds[0];
    c.tenant_fds = fds + 1;
    return server_create(&a->server, &c, err);
}

/* Sockets first: with another daemon there, this one ends before it has taken any memory. */
static kvs_status start(app *a, kvs_err *err)
{
    int arena, table;
    kvs_status s;

    notify_memory(&arena, &table);
    s = open_server(a, err);
    if (s == KVS_OK) {
        open_metrics(a);
        s = devices_open(&a->devices, &a->config, err);
    }
    if (s == KVS_OK)
        s = open_memory(a, arena, table, err);
    if (s == KVS_OK)
        s = mailbox_create(&a->mailbox, &a->loop, err);
    if (s == KVS_OK)
        s = core_create_on(&a->core, &a->config, a->devices.dev, a->devices.n, mailbox_sink(a->mailbox), &a->memory,
                           conn_now_us(), err);
    if (s == KVS_OK) {
        core_set_edge(a->core, &a->edge);
        core_set_old_config(a->core, a->old_config ? a->note : NULL);
        s = server_start(a->server, a->core, a->mailbox, err);
    }
    if (s == KVS_OK) {
        core_set_operator(a->core, &(core_operator){reload, a});
        start_signals(a);
        start_metrics(a);
    }
    return s;
}

/* ---- end ---- */
static void close_handles(app *a)
{
    int rc;

    if (a->has_signals) {
        hold_signals(SIG_BLOCK); /* with its handle closed, a late hang-up would be fatal again */
        for (size_t i = 0; i < sizeof a->signals / sizeof a->signals[0]; i++)
            uv_close((uv_handle_t *)&a->signals[i], NULL);
        uv_close((uv_handle_t *)&a->limit, NULL);
        uv_close((uv_handle_t *)&a->notify_again, NULL);
        uv_close((uv_handle_t *)&a->heartbeat, NULL);
        uv_close((uv_handle_t *)&a->watchdog, NULL);
    }
    (void)uv_run(&a->loop, UV_RUN_DEFAULT);
    rc = uv_loop_close(&a->loop);
    if (rc != 0) {
        log_event(LOG_LEVEL_ERROR, "handles_leaked", " err=%s", uv_strerror(rc));
        a->exit_code = EXIT_CODE_DEVICE;
    }
}

static void take_down(app *a)
{
    stop_metrics(a);
    if (a->core != NULL) {
        core_stop(a->core);
        mailbox_drain(a->mailbox);
        core_destroy(a->core);
    }
    server_close(a->server);
    mailbox_close(a->mailbox); /* drained once more */
    board_destroy(a->board);
    close_handles(a);
    notify_close(&a->notify);
    devices_close(&a->devices);
    persist_close(&a->memory);
}

static int run(app *a)
{
    kvs_err err = {0};
    int rc = uv_loop_init(&a->loop);

    a->memory.arena_fd = a->memory.table_fd = -1;
    a->proven_bytes = a->config.pool_max_bytes; /* once it serves */
    if (rc != 0) {
        log_event(LOG_LEVEL_ERROR, "start_failed", " err=%s", uv_strerror(rc));
        return EXIT_CODE_SYSTEM;
    }
    log_event(LOG_LEVEL_INFO, "starting", " version=%s config=%s pool_max_bytes=%lld device=%s", KVS_VERSION,
              a->options.config_path != NULL ? a->options.config_path : "-", (long long)a->config.pool_max_bytes,
              a->config.device_kind);
    if (a->options.config_path == NULL)
        log_event(LOG_LEVEL_WARN, "no_config_file", " path=%s msg=\"built-in defaults\"", OPTIONS_DEFAULT_CONFIG);
    process_check_memory(&a->config);
    notify_open(&a->notify);
    notify_status(&a->notify, "starting");
    if (start(a, &err) == KVS_OK) {
        (void)uv_run(&a->loop, UV_RUN_DEFAULT);
    } else {
        a->exit_code = start_failed(a, &err);
    }
    if (a->torn)
        return a->exit_code; /* jobs may still be running on this memory */
    take_down(a);
    log_event(LOG_LEVEL_INFO, "stopped", " exit=%d", a->exit_code);
    return a->exit_code;
}

static int serve(app *a)
{
    kvs_err err = {0};

    log_open(LOG_LEVEL_INFO, process_logs_to_journal());
    metrics_edge_init(&a->edge);
    if (accepted_config(&a->options, &a->config, &a->old_config, &err) != KVS_OK) {
        log_failure("config_refused", &err);
        return EXIT_CODE_CONFIG;
    }
    if (a->old_config) {
        log_failure("config_refused", &err);
        log_event(LOG_LEVEL_ERROR, "old_config", " file=%s msg=\"the last accepted configuration is in use\"",
                  a->options.accepted_path);
        (void)snprintf(a->note, sizeof a->note, "%s", err.msg);
    }
    log_set_level(level_of(a->config.log_level));
    process_raise_fds();
    process_keep_memory();
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGUSR1, SIG_IGN); /* they mean nothing here, and must not kill */
    (void)signal(SIGUSR2, SIG_IGN);
    return run(a);
}

/* Under a service manager that does not try these codes again: how to go on. */
static void log_hint(int code)
{
    if ((code == EXIT_CODE_CONFIG || code == EXIT_CODE_BUSY) && getenv("INVOCATION_ID") != NULL)
        log_event(LOG_LEVEL_ERROR, "not_started_again",
                  " exit=%d hint=\"mend it, then: systemctl start kvstrided; after start-limit-hit first: systemctl "
                  "reset-failed kvstrided\"",
                  code);
}

static int print_result(bool good)
{
    const bool written = fflush(stdout) == 0 && !ferror(stdout);

    if (!written) /* a closed pipe is not success */
        (void)fprintf(stderr, "kvstrided: standard output cannot be written\n");
    return !good ? EXIT_CODE_CONFIG : written ? EXIT_CODE_OK : EXIT_CODE_SYSTEM;
}

/* The words of a command line and the paths in them may hold anything, and this goes to a terminal. */
static void complain(kvs_err *err, const char *hint)
{
    text_tame(err->msg);
    (void)fprintf(stderr, "kvstrided: %s\n%s", err->msg, hint);
}

static int check_or_print(app *a)
{
    char name[PATH_MAX];
    kvs_err err = {0};

    if (options_config(&a->options, &a->config, &err) != KVS_OK) {
        complain(&err, "");
        return print_result(false);
    }
    if (a->options.action == OPTIONS_CHECK) {
        (void)snprintf(name, sizeof name, "%s",
                       a->options.config_path != NULL ? a->options.config_path : "built-in defaults");
        text_tame(name);
        process_check_memory(&a->config);
        (void)printf("%s: good\n", name);
    } else {
        config_print(&a->config, stdout);
    }
    return print_result(true);
}

static int act(app *a)
{
    int code;

    switch (a->options.action) {
    case OPTIONS_CHECK:
    case OPTIONS_PRINT_CONFIG:
        return check_or_print(a);
    case OPTIONS_PRINT_SCHEMA:
        config_print_schema(stdout);
        return print_result(true);
    case OPTIONS_PRINT_TABLE:
        config_print_table(stdout);
        return print_result(true);
    case OPTIONS_VERSION:
        (void)printf("kvstrided %s\n", KVS_VERSION);
        return print_result(true);
    case OPTIONS_HELP:
        options_help(stdout);
        return print_result(true);
    case OPTIONS_RUN:
        break;
    }
    code = serve(a);
    log_hint(code);
    return code;
}

int main(int argc, char **argv)
{
    kvs_err err;
    app *a;
    int code;

    hold_signals(SIG_BLOCK);
    (void)signal(SIGXFSZ, SIG_IGN); /* a file above RLIMIT_FSIZE is an error with a message, not the end */
    std_fds_fill();
    a = calloc(1, sizeof *a); /* two configurations of paths: not for the stack */
    if (a == NULL)
        return EXIT_CODE_SYSTEM;
    if (options_parse(&a->options, argc, argv, &err) != KVS_OK) {
        complain(&err, "Try 'kvstrided --help'.\n");
        free(a);
        return EXIT_CODE_USAGE;
    }
    code = act(a);
    if (!a->torn)
        free(a);
    return code;
}
