#include "kernels/cuda_nodes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define DRIVER "/proc/driver/nvidia"
#define CARDS  DRIVER "/gpus"

typedef struct search {
    const char *root;
    char *ret;
    size_t cap;
} search;

static void path_of(const search *s, const char *name, char path[PATH_MAX])
{
    (void)snprintf(path, PATH_MAX, "%s%s", s->root, name);
}

/* The number that the kernel has given to a driver's character devices; -1: none, or it does not tell. */
static int major_of(const search *s, const char *driver)
{
    char path[PATH_MAX], line[128], name[64];
    int number, found = -1;
    FILE *f;

    path_of(s, "/proc/devices", path);
    f = fopen(path, "re");
    if (f == NULL)
        return -1;
    while (found < 0 && fgets(line, sizeof line, f) != NULL && strncmp(line, "Block", 5) != 0)
        if (sscanf(line, "%d %63s", &number, name) == 2 && strcmp(name, driver) == 0)
            found = number;
    (void)fclose(f);
    return found;
}

/* True: it can be opened and is what it should be.  Else the sentence is written. */
static bool node_is_good(const search *s, const char *name, int number)
{
    char path[PATH_MAX];
    struct stat st;
    int fd, e;

    path_of(s, name, path);
    fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        e = errno;
        (void)snprintf(s->ret, s->cap, "%s cannot be opened (%s); %s", name, strerror(e),
                       e == ENOENT ? "is PrivateDevices= set, or the node not made?" : "does a DeviceAllow= lack it?");
        return false;
    }
    e = fstat(fd, &st);
    (void)close(fd);
    if (e != 0 || number < 0 || (S_ISCHR(st.st_mode) && (int)major(st.st_rdev) == number))
        return true;
    (void)snprintf(s->ret, s->cap, "%s is another device (number %u, the driver's is %d)", name, major(st.st_rdev),
                   number);
    return false;
}

/* "Device Minor: 3" of a card: its node is /dev/nvidia3. */
static int minor_of(const search *s, const char *card)
{
    char name[NAME_MAX + sizeof CARDS "//information"], path[PATH_MAX], line[256];
    int number = -1;
    FILE *f;

    (void)snprintf(name, sizeof name, CARDS "/%s/information", card);
    path_of(s, name, path);
    f = fopen(path, "re");
    if (f == NULL)
        return -1;
    while (number < 0 && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "Device Minor: %d", &number) != 1)
            number = -1;
    (void)fclose(f);
    return number;
}

/* Every card's node: one that is hidden can be why the driver gives up on all of them. */
static bool cards_are_good(const search *s)
{
    char path[PATH_MAX];
    struct dirent *e;
    bool good = true;
    DIR *dir;

    path_of(s, CARDS, path);
    dir = opendir(path);
    if (dir == NULL)
        return true; /* some containers hide it, and work */
    while (good && (e = readdir(dir)) != NULL) {
        char name[32];
        int number = e->d_name[0] != '.' ? minor_of(s, e->d_name) : -1;

        if (number < 0)
            continue;
        (void)snprintf(name, sizeof name, "/dev/nvidia%d", number);
        good = node_is_good(s, name, -1);
    }
    (void)closedir(dir);
    return good;
}

/* The driver names its threads there while it starts, and gives up if it may not. */
static bool proc_is_writable(const search *s)
{
    static const char NAME[] = "/proc/self/comm";
    char path[PATH_MAX];
    int fd, e;

    path_of(s, NAME, path);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void)close(fd);
        return true;
    }
    e = errno;
    (void)snprintf(s->ret, s->cap, "%s cannot be written (%s); is /proc read-only?", NAME, strerror(e));
    return false;
}

const char *kvs_cuda_nodes_explain(const char *root, char *ret, size_t cap)
{
    search s = {root, ret, cap};
    char path[PATH_MAX];

    ret[0] = '\0';
    path_of(&s, "/proc/devices", path);
    if (access(path, F_OK) != 0) {
        (void)snprintf(ret, cap, "/proc/devices is hidden; is ProcSubset=pid set?");
        return ret;
    }
    path_of(&s, DRIVER, path);
    if (access(path, F_OK) == 0) {
        if (proc_is_writable(&s) && node_is_good(&s, "/dev/nvidiactl", -1) &&
            node_is_good(&s, "/dev/nvidia-uvm", major_of(&s, "nvidia-uvm")))
            (void)cards_are_good(&s);
    } else if (major_of(&s, "nvidia-uvm") >= 0 || major_of(&s, "nvidia") >= 0) {
        (void)snprintf(ret, cap, DRIVER " is hidden; is ProcSubset= or ProtectProc= set?");
    }
    return ret;
}
