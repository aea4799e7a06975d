/* Paths that macOS does not have. */

#include "mac_kernel.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

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
ON_PATH(int, execv, -1, (const char *path, char *const words[]), (path, words))
ON_PATH(int, execve, -1, (const char *path, char *const words[], char *const environment[]),
        (path, words, environment))
