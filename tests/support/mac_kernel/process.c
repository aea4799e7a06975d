/* Which processes are imitated, their limits, and calls that macOS does not have. */

#include "mac_kernel.h"
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

int imitated;

/* A terminal's programs may open 256 files: NOFILE (XNU, bsd/sys/param.h). Later processes keep what they inherit. */
__attribute__((constructor)) static void start(void)
{
    char program[4096] = "";
    const char *name;
    struct rlimit files;

    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) return;
    name = strrchr(program, '/');
    imitated = !strncmp(name ? name + 1 : program, "python", 6);
    if (imitated && !getenv("MAC_KERNEL_STARTED") && !setenv("MAC_KERNEL_STARTED", "1", 1)
        && !getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = 256;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

enum { OPEN_FILES = 10240 };

/* setrlimit(2), Compatibility: more than OPEN_MAX (bsd/sys/syslimits.h) is refused; the hard limit is unlimited. */
int setrlimit(__rlimit_resource_t resource, const struct rlimit *wanted)
{
    struct rlimit given = *wanted, now;

    NEXT(setrlimit);
    NEXT(getrlimit);
    if (imitated && resource == RLIMIT_NOFILE) {
        if (given.rlim_cur > OPEN_FILES) REFUSE(EINVAL, -1);
        if (given.rlim_max == RLIM_INFINITY && !next_getrlimit(resource, &now)) given.rlim_max = now.rlim_max;
    }
    return next_setrlimit(resource, &given);
}

int setrlimit64(__rlimit_resource_t resource, const struct rlimit64 *wanted)
{
    return setrlimit(resource, (const struct rlimit *)wanted);
}

int getrlimit(__rlimit_resource_t resource, struct rlimit *answer)
{
    int result;

    NEXT(getrlimit);
    result = next_getrlimit(resource, answer);
    /* Unless the program itself has lowered it, as mlx-lm does. */
    if (imitated && resource == RLIMIT_NOFILE && !result && answer->rlim_max >= OPEN_FILES)
        answer->rlim_max = RLIM_INFINITY;
    return result;
}

int getrlimit64(__rlimit_resource_t resource, struct rlimit64 *answer)
{
    return getrlimit(resource, (struct rlimit *)answer);
}

/* None of them is in XNU's bsd/kern/syscalls.master. */
#define ABSENT(name, parameters, arguments) \
    int name parameters { NEXT(name); if (imitated) REFUSE(ENOSYS, -1); return next_##name arguments; }

ABSENT(sched_setaffinity, (pid_t process, size_t size, const cpu_set_t *cores), (process, size, cores))
ABSENT(sched_getaffinity, (pid_t process, size_t size, cpu_set_t *cores), (process, size, cores))
ABSENT(memfd_create, (const char *name, unsigned flags), (name, flags))

int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d)
{
    NEXT(prctl);
    if (imitated) REFUSE(ENOSYS, -1);
    return next_prctl(option, a, b, c, d);
}
