/* Device nodes that are hidden: a root of plain files takes the place of /dev and /proc. */
#include "kernels/cuda_nodes.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64];
static char text[256];

static void folder(const char *name)
{
    char path[256];

    (void)snprintf(path, sizeof path, "%s%s", root, name);
    cr_assert_eq(mkdir(path, 0700), 0, "%s", path);
}

static void file(const char *name, const char *content)
{
    char path[256];
    FILE *f;

    (void)snprintf(path, sizeof path, "%s%s", root, name);
    f = fopen(path, "we");
    cr_assert(f != NULL && fputs(content, f) >= 0 && fclose(f) == 0, "%s", path);
}

static void gone(const char *name)
{
    char path[256];

    (void)snprintf(path, sizeof path, "%s%s", root, name);
    cr_assert_eq(unlink(path), 0, "%s", path);
}

/* A machine with two cards, all nodes there. */
static void setup(void)
{
    (void)snprintf(root, sizeof root, "/tmp/kvs-nodes-XXXXXX");
    cr_assert_not_null(mkdtemp(root));
    folder("/dev");
    folder("/proc");
    folder("/proc/self");
    file("/proc/self/comm", "");
    folder("/proc/driver");
    folder("/proc/driver/nvidia");
    folder("/proc/driver/nvidia/gpus");
    folder("/proc/driver/nvidia/gpus/0000:00:05.0");
    folder("/proc/driver/nvidia/gpus/0000:00:06.0");
    file("/proc/driver/nvidia/gpus/0000:00:05.0/information", "Model: x\nDevice Minor: \t 0\n");
    file("/proc/driver/nvidia/gpus/0000:00:06.0/information", "Model: x\nDevice Minor: \t 1\n");
    file("/proc/devices", "Character devices:\n195 nvidia\n\nBlock devices:\n511 nvidia-uvm\n");
    file("/dev/nvidiactl", "");
    file("/dev/nvidia-uvm", "");
    file("/dev/nvidia0", "");
    file("/dev/nvidia1", "");
}

static void teardown(void)
{
    char command[128];

    (void)snprintf(command, sizeof command, "rm -rf %s", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(cuda_nodes, .init = setup, .fini = teardown);

static void says(const char *want, const char *besides)
{
    (void)kvs_cuda_nodes_explain(root, text, sizeof text);
    cr_assert(strstr(text, want) != NULL && strstr(text, besides) != NULL, "\"%s\" lacks \"%s\" or \"%s\"", text, want,
              besides);
}

Test(cuda_nodes, finds_nothing_where_all_is_there)
{
    cr_assert_str_eq(kvs_cuda_nodes_explain(root, text, sizeof text), "");
}

Test(cuda_nodes, finds_nothing_without_a_driver)
{
    char path[128], to[160];

    (void)snprintf(path, sizeof path, "%s/proc/driver", root);
    (void)snprintf(to, sizeof to, "%s/elsewhere", root);
    cr_assert_eq(rename(path, to), 0);
    file("/proc/devices", "Character devices:\n  1 mem\n");
    cr_assert_str_eq(kvs_cuda_nodes_explain(root, text, sizeof text), "");
}

Test(cuda_nodes, names_the_node_that_private_devices_hides)
{
    gone("/dev/nvidiactl");
    says("/dev/nvidiactl cannot be opened (No such file", "PrivateDevices=");
}

Test(cuda_nodes, names_the_uvm_node)
{
    gone("/dev/nvidia-uvm");
    says("/dev/nvidia-uvm cannot be opened", "No such file");
}

Test(cuda_nodes, names_the_card_that_is_not_allowed)
{
    gone("/dev/nvidia1");
    says("/dev/nvidia1 cannot be opened", "No such file");
}

Test(cuda_nodes, sees_a_node_that_may_not_be_opened)
{
    char path[128];

    (void)snprintf(path, sizeof path, "%s/dev/nvidia-uvm", root);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkdir(path, 0700), 0); /* for root, too: opening it for writing is refused */
    says("/dev/nvidia-uvm cannot be opened (Is a directory)", "DeviceAllow=");
}

Test(cuda_nodes, sees_another_device_in_its_place)
{
    file("/proc/devices", "Character devices:\n195 nvidia\n509 nvidia-uvm\n\nBlock devices:\n");
    says("/dev/nvidia-uvm is another device", "509");
}

Test(cuda_nodes, sees_a_proc_that_may_not_be_written)
{
    gone("/proc/self/comm");
    folder("/proc/self/comm");
    says("/proc/self/comm cannot be written (Is a directory)", "read-only");
}

Test(cuda_nodes, sees_a_proc_of_processes_alone)
{
    gone("/proc/devices");
    says("/proc/devices is hidden", "ProcSubset=pid");
}

Test(cuda_nodes, sees_a_hidden_driver_folder)
{
    char path[128], to[160];

    (void)snprintf(path, sizeof path, "%s/proc/driver/nvidia", root);
    (void)snprintf(to, sizeof to, "%s/proc/elsewhere", root);
    cr_assert_eq(rename(path, to), 0);
    says("/proc/driver/nvidia is hidden", "ProcSubset=");
}
