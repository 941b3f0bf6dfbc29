#include "proto/cgroup.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PATH = 4096 };

typedef struct walk {
    const char *tree, *controller;
    void (*visit)(void *ud, const char *dir);
    void *ud;
} walk;

static void visit_all_around(const walk *w, const char *tree, const char *group)
{
    char dir[MAX_PATH];
    size_t root = strlen(tree);

    if ((size_t)snprintf(dir, sizeof dir, "%s%s", tree, group) >= sizeof dir)
        return;
    for (;;) {
        char *slash;

        w->visit(w->ud, dir);
        slash = strrchr(dir, '/');
        if (slash == NULL || (size_t)(slash - dir) < root)
            return;
        *slash = '\0';
    }
}

/* Is it one of them, "cpu,cpuacct" say? */
static bool is_among(const char *controllers, const char *wanted)
{
    const char *at = controllers;

    for (size_t n; *at != '\0'; at += n + (at[n] == ',')) {
        n = strcspn(at, ",");
        if (n == strlen(wanted) && memcmp(at, wanted, n) == 0)
            return true;
    }
    return false;
}

/* A line is number:controllers:group; no controllers: it is the one hierarchy of the newer kind. */
static void visit_line(const walk *w, char *line)
{
    char *controllers = strchr(line, ':'), *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    char older[MAX_PATH];

    if (group == NULL)
        return;
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    controllers++;
    if (controllers[0] == '\0')
        visit_all_around(w, w->tree, group);
    else if (is_among(controllers, w->controller) &&
             (size_t)snprintf(older, sizeof older, "%s/%s", w->tree, w->controller) < sizeof older)
        visit_all_around(w, older, group);
}

void cgroup_each(const char *membership, const char *tree, const char *controller,
                 void (*visit)(void *ud, const char *dir), void *ud)
{
    const walk w = {tree, controller, visit, ud};
    FILE *f = fopen(membership, "re");
    char line[MAX_PATH];

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        visit_line(&w, line);
    if (f != NULL)
        (void)fclose(f);
}
