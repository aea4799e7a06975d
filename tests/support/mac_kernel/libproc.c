/* libproc's proc_pidinfo. */

#include "mac_kernel.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* bsd/sys/proc_info.h. */
struct proc_bsdinfo {
    uint32_t pbi_flags, pbi_status, pbi_xstatus, pbi_pid, pbi_ppid;
    uint32_t pbi_uid, pbi_gid, pbi_ruid, pbi_rgid, pbi_svuid, pbi_svgid, rfu_1;
    char pbi_comm[16], pbi_name[32];
    uint32_t pbi_nfiles, pbi_pgid, pbi_pjobc, e_tdev, e_tpgid;
    int32_t pbi_nice;
    uint64_t pbi_start_tvsec, pbi_start_tvusec;
};

enum { PROC_PIDTBSDINFO = 3 };

/* Seconds since 1970 of the last start of the machine (proc(5), /proc/stat). */
static uint64_t boot_time(void)
{
    char line[256];
    unsigned long seconds = 0;
    FILE *file;

    NEXT(fopen);
    file = next_fopen("/proc/stat", "r");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "btime %lu", &seconds) != 1) continue;
    if (file) fclose(file);
    return seconds;
}

/* libsyscall/wrappers/libproc/libproc.c: 0 for an error. bsd/kern/proc_info.c, proc_pidinfo: ENOMEM for a buffer that
   is too small, ESRCH for a process that has ended, a zombie too; EPERM for another user's. */
int proc_pidinfo(int process, int flavor, uint64_t argument, void *buffer, int size)
{
    struct proc_bsdinfo info = {.pbi_pid = (uint32_t)process};
    char path[64], line[1024] = "", *rest, state;
    unsigned long long ticks;
    struct stat owner;
    FILE *file;

    (void)argument;
    NEXT(fopen);
    NEXT(stat);
    if (flavor != PROC_PIDTBSDINFO) REFUSE(EINVAL, 0);
    if (size < (int)sizeof info) REFUSE(ENOMEM, 0);
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    file = next_fopen(path, "r");
    if (!file) REFUSE(ESRCH, 0);
    rest = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    /* Fields 3 and 22. */
    if (!rest || sscanf(rest, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                        &state, &ticks) != 2 || state == 'Z' || state == 'X')
        REFUSE(ESRCH, 0);
    if (geteuid() && !next_stat(path, &owner) && owner.st_uid != geteuid()) REFUSE(EPERM, 0);
    info.pbi_start_tvsec = boot_time() + ticks / (unsigned long long)sysconf(_SC_CLK_TCK);
    memcpy(buffer, &info, sizeof info);
    return (int)sizeof info;
}
