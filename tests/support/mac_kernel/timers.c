/* Timers that are late. */

#include "mac_kernel.h"
#include <poll.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>

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
