/* Paths of sockets, and SO_REUSEADDR. */

#include "mac_kernel.h"
#include <arpa/inet.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

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
