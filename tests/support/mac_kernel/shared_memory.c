/* POSIX shared memory. */

#include "mac_kernel.h"
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
