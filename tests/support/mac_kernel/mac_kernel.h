/* Makes Linux answer a Python process as macOS does where a program notices: a library for LD_PRELOAD.

   Each behaviour names its source. XNU is github.com/apple-oss-distributions/xnu (read at xnu-11417.101.15).
   What glibc does inside itself (shm_open opens a file of /dev/shm) does not come through here. Other programs than
   Python (ps, a compiler, a browser) are built for Linux and stay on it. Not imitated: kqueue in place of epoll;
   eventfd and MSG_NOSIGNAL, which libzmq was built with; read and write on shared memory, which macOS refuses; timed
   waits for locks. What Python's own modules lack on macOS, python/sitecustomize.py takes away. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

/* The function that the next library defines. */
#define NEXT(name) \
    static __typeof__(&name) next_##name; \
    if (!next_##name) next_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define REFUSE(number, result) do { errno = (number); return (result); } while (0)

/* Whether this process is Python. */
extern int imitated;
