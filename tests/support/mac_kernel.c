/* Makes Linux answer a Python process as macOS does where a program notices: a library for LD_PRELOAD.

   Each behaviour names its source. XNU is github.com/apple-oss-distributions/xnu (read at xnu-11417.101.15).
   What glibc does inside itself (shm_open opens a file of /dev/shm) does not come through here. Other programs than
   Python (ps, a compiler, a browser) are built for Linux and stay on it. Not imitated: kqueue in place of epoll,
   MSG_NOSIGNAL and eventfd, which libzmq was built with, and everything that Python's own modules lack on macOS:
   mac_python/sitecustomize.py takes that away. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* The function that the next library defines. */
#define NEXT(name) \
    static __typeof__(&name) next_##name; \
    if (!next_##name) next_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define REFUSE(number, result) do { errno = (number); return (result); } while (0)

static int imitated;

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

/* --- Shared memory -------------------------------------------------------------------------------------------- */

enum { NAME_LENGTH = 31, PAGE = 16384 };

static off_t whole_pages(off_t length)
{
    return (length + PAGE - 1) / PAGE * PAGE;
}

/* Whether a descriptor is shared memory: a file on the file system of /dev/shm. */
static int is_shared_memory(int descriptor, struct stat *found)
{
    static dev_t device;
    struct stat folder;

    NEXT(fstat);
    NEXT(stat);
    if (!imitated || descriptor < 0) return 0;
    if (!device && !next_stat("/dev/shm", &folder)) device = folder.st_dev;
    return !next_fstat(descriptor, found) && S_ISREG(found->st_mode) && found->st_dev == device;
}

/* bsd/kern/posix_shm.c, pshm_stat: only mode (as given to shm_open, so without S_IFREG), owner and size are filled in;
   pshm_truncate rounds the size up to pages, which have 16 KiB on Apple silicon. */
static void describe(const struct stat *found, struct stat *answer)
{
    struct stat shared = {.st_mode = found->st_mode & 07777, .st_uid = found->st_uid, .st_gid = found->st_gid,
                          .st_size = whole_pages(found->st_size)};
    *answer = shared;
}

int fstat(int descriptor, struct stat *answer)
{
    struct stat found;

    NEXT(fstat);
    if (!is_shared_memory(descriptor, &found)) return next_fstat(descriptor, answer);
    describe(&found, answer);
    return 0;
}

/* The same structure on 64-bit Linux. */
int fstat64(int descriptor, struct stat64 *answer)
{
    return fstat(descriptor, (struct stat *)answer);
}

/* pshm_truncate: one ftruncate in the life of an object. */
int ftruncate(int descriptor, off_t length)
{
    struct stat found;

    NEXT(ftruncate);
    if (!is_shared_memory(descriptor, &found)) return next_ftruncate(descriptor, length);
    if (found.st_size) REFUSE(EINVAL, -1);
    return next_ftruncate(descriptor, whole_pages(length));
}

int ftruncate64(int descriptor, off64_t length)
{
    return ftruncate(descriptor, length);
}

/* libsyscall/wrappers/unix03/mmap.c refuses length 0; bsd/kern/posix_shm.c, pshm_mmap, a private mapping and one beyond
   the object's end. */
void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
{
    struct stat found;

    NEXT(mmap);
    if (imitated && !length) REFUSE(EINVAL, MAP_FAILED);
    if (!(flags & MAP_ANONYMOUS) && is_shared_memory(descriptor, &found)
        && (!(flags & MAP_SHARED) || (off_t)length + offset > whole_pages(found.st_size)))
        REFUSE(EINVAL, MAP_FAILED);
    return next_mmap(address, length, protection, flags, descriptor, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off64_t offset)
{
    return mmap(address, length, protection, flags, descriptor, offset);
}

/* bsd/sys/posix_shm.h, PSHMNAMLEN; posix_shm.c, pshm_get_name: the name with its slash. */
int shm_open(const char *name, int flags, mode_t mode)
{
    NEXT(shm_open);
    if (imitated && strlen(name) > NAME_LENGTH) REFUSE(ENAMETOOLONG, -1);
    return next_shm_open(name, flags, mode);
}

int shm_unlink(const char *name)
{
    NEXT(shm_unlink);
    if (imitated && strlen(name) > NAME_LENGTH) REFUSE(ENAMETOOLONG, -1);
    return next_shm_unlink(name);
}

/* --- Paths that macOS does not have ----------------------------------------------------------------------------- */

/* macOS mounts no procfs, keeps shared memory in the kernel, and has `true` in /usr/bin alone (hier(7)). */
static int missing(const char *path)
{
    static const char *const folders[] = {"/proc", "/sys", "/dev/shm"};

    if (!imitated || !path) return 0;
    if (!strcmp(path, "/bin/true")) return 1;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        size_t length = strlen(folders[i]);
        if (!strncmp(path, folders[i], length) && (!path[length] || path[length] == '/')) return 1;
    }
    return 0;
}

#define MISSING(path, result) if (missing(path)) REFUSE(ENOENT, result)
#define ON_PATH(type, name, failure, parameters, arguments) \
    type name parameters { NEXT(name); MISSING(path, failure); return next_##name arguments; }
#define OPENING(name, parameters, arguments) \
    int name parameters { \
        mode_t mode = 0; va_list rest; \
        NEXT(name); MISSING(path, -1); \
        va_start(rest, flags); if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); va_end(rest); \
        return next_##name arguments; }

OPENING(open, (const char *path, int flags, ...), (path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENING(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPENING(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
ON_PATH(FILE *, fopen, NULL, (const char *path, const char *mode), (path, mode))
ON_PATH(FILE *, fopen64, NULL, (const char *path, const char *mode), (path, mode))
ON_PATH(int, stat, -1, (const char *path, struct stat *answer), (path, answer))
ON_PATH(int, stat64, -1, (const char *path, struct stat64 *answer), (path, answer))
ON_PATH(int, lstat, -1, (const char *path, struct stat *answer), (path, answer))
ON_PATH(int, lstat64, -1, (const char *path, struct stat64 *answer), (path, answer))
ON_PATH(int, fstatat, -1, (int folder, const char *path, struct stat *answer, int flags), (folder, path, answer, flags))
ON_PATH(int, fstatat64, -1, (int folder, const char *path, struct stat64 *answer, int flags),
        (folder, path, answer, flags))
ON_PATH(int, access, -1, (const char *path, int mode), (path, mode))
ON_PATH(int, faccessat, -1, (int folder, const char *path, int mode, int flags), (folder, path, mode, flags))
ON_PATH(int, statvfs, -1, (const char *path, struct statvfs *answer), (path, answer))
ON_PATH(int, statvfs64, -1, (const char *path, struct statvfs64 *answer), (path, answer))
ON_PATH(ssize_t, readlink, -1, (const char *path, char *answer, size_t size), (path, answer, size))
ON_PATH(ssize_t, readlinkat, -1, (int folder, const char *path, char *answer, size_t size),
        (folder, path, answer, size))
ON_PATH(DIR *, opendir, NULL, (const char *path), (path))
ON_PATH(int, execve, -1, (const char *path, char *const words[], char *const environment[]),
        (path, words, environment))

/* --- Calls that macOS does not have ------------------------------------------------------------------------------ */

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

/* --- Limits ------------------------------------------------------------------------------------------------------ */

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
    if (imitated && resource == RLIMIT_NOFILE && !result) answer->rlim_max = RLIM_INFINITY;
    return result;
}

int getrlimit64(__rlimit_resource_t resource, struct rlimit64 *answer)
{
    return getrlimit(resource, (struct rlimit *)answer);
}

/* --- Sockets ----------------------------------------------------------------------------------------------------- */

enum { SOCKET_PATH = 104, LISTENING = 10 };

/* bsd/sys/un.h: sun_path has 104 bytes, of which programs fill 103. There are no abstract names: an empty path is not
   found (bsd/kern/uipc_usrreq.c, unp_bind and unp_connect, which look the path up). */
static int socket_refusal(const struct sockaddr *address, socklen_t size)
{
    const char *path = ((const struct sockaddr_un *)address)->sun_path;
    size_t room = size - offsetof(struct sockaddr_un, sun_path);

    if (!imitated || address->sa_family != AF_UNIX || size <= offsetof(struct sockaddr_un, sun_path)) return 0;
    if (!path[0]) return ENOENT;
    return strnlen(path, room) >= SOCKET_PATH ? ENAMETOOLONG : 0;
}

/* Whether a socket listens at exactly this address and port. */
static int listened_at(const struct sockaddr_in *wanted)
{
    char line[512];
    unsigned address, port, state;
    int found = 0;
    FILE *table;

    NEXT(fopen);
    table = next_fopen("/proc/net/tcp", "r");
    while (table && !found && fgets(line, sizeof line, table))
        found = sscanf(line, " %*d: %x:%x %*x:%*x %x", &address, &port, &state) == 3 && state == LISTENING
            && address == wanted->sin_addr.s_addr && port == ntohs(wanted->sin_port);
    if (table) fclose(table);
    return found;
}

/* bsd/netinet/in_pcb.c, in_pcbbind: with SO_REUSEADDR only a socket at exactly the same address is in the way, so
   127.0.0.1 can be bound beside * and the other way round. Linux allows that to sockets with SO_REUSEPORT. IPv4 only. */
static void let_share(int descriptor, const struct sockaddr *address)
{
    const struct sockaddr_in *wanted = (const struct sockaddr_in *)address;
    int reuse = 0, kind = 0;
    socklen_t size = sizeof reuse;

    if (!imitated || address->sa_family != AF_INET || !wanted->sin_port) return;
    if (getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &kind, &size) || kind != SOCK_STREAM) return;
    if (getsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &reuse, &size) || !reuse || listened_at(wanted)) return;
    setsockopt(descriptor, SOL_SOCKET, SO_REUSEPORT, &reuse, sizeof reuse);
}

int bind(int descriptor, const struct sockaddr *address, socklen_t size)
{
    int refusal = socket_refusal(address, size);

    NEXT(bind);
    if (refusal) REFUSE(refusal, -1);
    let_share(descriptor, address);
    return next_bind(descriptor, address, size);
}

int connect(int descriptor, const struct sockaddr *address, socklen_t size)
{
    int refusal = socket_refusal(address, size);

    NEXT(connect);
    if (refusal) REFUSE(refusal, -1);
    return next_connect(descriptor, address, size);
}

/* --- Timers ------------------------------------------------------------------------------------------------------ */

enum { SECOND = 1000000000, MILLISECOND = 1000000 };

/* osfmk/kern/timer_call.c, timer_call_slop: a timer of t may be late by t >> 3, at most 1 ms (osfmk/arm/arm_timer.c,
   tcoal_prio_params_init). Here it always is. */
static void be_late(int64_t nanoseconds)
{
    struct timespec late = {.tv_sec = 0};

    NEXT(nanosleep);
    if (!imitated || nanoseconds <= 0) return;
    late.tv_nsec = nanoseconds / 8 < MILLISECOND ? nanoseconds / 8 : MILLISECOND;
    next_nanosleep(&late, NULL);
}

static int64_t in_nanoseconds(const struct timespec *time)
{
    return time ? (int64_t)time->tv_sec * SECOND + time->tv_nsec : 0;
}

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    int result;

    NEXT(nanosleep);
    result = next_nanosleep(wanted, left);
    if (!result) be_late(in_nanoseconds(wanted));
    return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left)
{
    struct timespec now = {0};
    int result;

    NEXT(clock_nanosleep);
    if (flags & TIMER_ABSTIME) clock_gettime(clock, &now);
    result = next_clock_nanosleep(clock, flags, wanted, left);
    if (!result) be_late(in_nanoseconds(wanted) - in_nanoseconds(&now));
    return result;
}

int poll(struct pollfd *files, nfds_t count, int milliseconds)
{
    int ready;

    NEXT(poll);
    ready = next_poll(files, count, milliseconds);
    if (!ready) be_late((int64_t)milliseconds * MILLISECOND);
    return ready;
}

int epoll_wait(int descriptor, struct epoll_event *events, int most, int milliseconds)
{
    int ready;

    NEXT(epoll_wait);
    ready = next_epoll_wait(descriptor, events, most, milliseconds);
    if (!ready) be_late((int64_t)milliseconds * MILLISECOND);
    return ready;
}

int select(int count, fd_set *in, fd_set *out, fd_set *exceptional, struct timeval *patience)
{
    int64_t wanted = patience ? (int64_t)patience->tv_sec * SECOND + patience->tv_usec * 1000 : 0;
    int ready;

    NEXT(select);
    ready = next_select(count, in, out, exceptional, patience);
    if (!ready) be_late(wanted);
    return ready;
}

/* --- libproc ----------------------------------------------------------------------------------------------------- */

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
