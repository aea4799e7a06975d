"""The imitation answers as macOS does, each time with the error that macOS gives. Every answer is asked from Python."""

import pytest

from tests.support.mac_kernel.imitation import Mac
from tests.support.processes import free_ports

PRELUDE = """
import _posixshmem, ctypes, errno, mmap, os, resource, select, signal, socket, subprocess, sys, time
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)

def error(call, *arguments):
    try:
        call(*arguments)
    except OSError as failure:
        return errno.errorcode[failure.errno]

def failure(result):
    return errno.errorcode[ctypes.get_errno()] if result == -1 else None

def segment(name="/lp-imitated", size=5000):
    descriptor = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT, 0o600)
    _posixshmem.shm_unlink(name)
    if size:
        os.ftruncate(descriptor, size)
    return descriptor
"""


def told(mac: Mac, program: str) -> str:
    """What a program prints on the imitated Mac."""
    run = mac.run(["-c", PRELUDE + program], timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


LAWS = {
    # Shared memory
    "its mode has no S_IFREG": ("print(oct(os.fstat(segment()).st_mode))", "0o600"),
    "its size is rounded up to 16 KiB": ("print(os.fstat(segment()).st_size)", "16384"),
    "what is rounded up can be used": (
        "m = mmap.mmap(segment(), 16384); m[16383] = 7; print(m[16383])",
        "7",
    ),
    "a second ftruncate is refused": ("print(error(os.ftruncate, segment(), 9000))", "EINVAL"),
    "a length of 0 is refused": ("print(error(mmap.mmap, segment(), 0))", "EINVAL"),
    "more than there is can not be mapped": ("print(error(mmap.mmap, segment(), 16385))", "EINVAL"),
    "a private mapping is refused": ("print(error(mmap.mmap, segment(), 4096, mmap.MAP_PRIVATE))", "EINVAL"),
    "before ftruncate nothing can be mapped": ("print(error(mmap.mmap, segment(size=0), 1))", "EINVAL"),
    "a name of 31 characters": ("os.close(segment('/' + 'n' * 30)); print('made')", "made"),
    "a name of 32 characters": ("print(error(segment, '/' + 'n' * 31))", "ENAMETOOLONG"),
    "other files are as they were": (
        "f = open(sys.executable, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(len(m) == "
        "os.fstat(f.fileno()).st_size)",
        "True",
    ),
    # Paths
    "paths that it lacks": (
        "print([Path(p).exists() for p in ('/proc', '/proc/self/stat', '/sys', '/dev/shm', '/bin/true')])",
        "[False, False, False, False, False]",
    ),
    "paths that it has": (
        "print([Path(p).exists() for p in ('/dev/null', '/dev/fd', '/usr/bin/true', '/bin/sh', '/procession')])",
        "[True, True, True, True, False]",
    ),
    "opening what it lacks": ("print(error(open, '/proc/stat'), error(os.listdir, '/dev/shm'))", "ENOENT ENOENT"),
    "running what it lacks": ("print(error(subprocess.run, ['/bin/true']))", "ENOENT"),
    # Calls
    "calls that it lacks": (
        "print([failure(libc[name](*arguments)) for name, *arguments in (('prctl', 15, b'name', 0, 0, 0), "
        "('memfd_create', b'n', 0), ('sched_setaffinity', 0, 8, bytes(8)), ('sched_getaffinity', 0, 8, bytes(8)))])",
        "['ENOSYS', 'ENOSYS', 'ENOSYS', 'ENOSYS']",
    ),
    "what Python lacks there": (
        "print([hasattr(m, n) for m, n in ((os, 'sched_getaffinity'), (os, 'sched_setaffinity'), (os, 'memfd_create'), "
        "(os, 'pidfd_open'), (socket, 'MSG_NOSIGNAL'), (select, 'epoll'), (resource, 'prlimit'))])",
        str([False] * 7),
    ),
    "waitid before Python 3.13": ("print(hasattr(os, 'waitid') == (sys.version_info >= (3, 13)))", "True"),
    # Limits
    "256 descriptors and no hard limit": ("print(resource.getrlimit(resource.RLIMIT_NOFILE))", "(256, -1)"),
    "10,240 descriptors at most": (
        "files = resource.RLIMIT_NOFILE\n"
        "resource.setrlimit(files, (10240, -1)); print(resource.getrlimit(files)[0])\n"
        "try: resource.setrlimit(files, (10241, -1))\n"
        "except (OSError, ValueError): print('refused')",
        "10240\nrefused",
    ),
    "a hard limit that was lowered": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096)); print(resource.getrlimit(resource.RLIMIT_NOFILE))",
        "(2048, 4096)",
    ),
    "the 257th descriptor is refused": (
        "print(error(lambda: [os.open('/dev/null', 0) for _ in range(257)]))",
        "EMFILE",
    ),
    "a child keeps a limit that was raised": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, -1)); sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', 'import resource; print(resource.getrlimit(7)[0])'])",
        "1000",
    ),
    # Sockets
    "a socket path of 103 bytes": (
        "p = '/tmp/' + 'p' * 98; socket.socket(socket.AF_UNIX).bind(p); os.unlink(p); print(len(p))",
        "103",
    ),
    "a socket path of 104 bytes": (
        "s, p = socket.socket(socket.AF_UNIX), '/tmp/' + 'p' * 99; print(error(s.bind, p), error(s.connect, p))",
        "ENAMETOOLONG ENAMETOOLONG",
    ),
    "no abstract sockets": (
        "s = socket.socket(socket.AF_UNIX); print(error(s.bind, b'\\0name'), error(s.connect, b'\\0name'))",
        "ENOENT ENOENT",
    ),
    # Processes
    "libproc tells the start of a process": (
        "from protocol.processes import _from_libproc, start_time\n"
        "print(start_time(os.getpid()) == _from_libproc(os.getpid(), libc) != None)",
        "True",
    ),
    "libproc does not find zombies": (
        "from protocol.processes import start_time\n"
        "child = subprocess.Popen(['/bin/sh', '-c', 'exit'])\n"
        "while start_time(child.pid): time.sleep(0.01)\n"
        "print(start_time(child.pid), start_time(2 ** 22 + 1))",
        "None None",
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("program", "answer"), LAWS.values(), ids=LAWS)
def test_the_imitation_answers_as_macos_does(mac: Mac, program: str, answer: str):
    assert told(mac, program) == answer


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep({})",
        "select.select([], [], [], {})",
        "select.poll().poll({} * 1000)",
        "libc.nanosleep(ctypes.byref((ctypes.c_long * 2)(0, int({} * 1e9))), None)",
    ],
)
@pytest.mark.parametrize(("seconds", "late"), [(0.004, 0.0005), (0.02, 0.001)])
def test_a_timer_is_late_by_an_eighth_and_at_most_by_a_millisecond(mac: Mac, wait: str, seconds: float, late: float):
    program = f"b = time.perf_counter(); {wait.format(seconds)}; print(time.perf_counter() - b)"

    assert float(told(mac, program)) >= seconds + late


def listening(host: str, port: int) -> str:
    """A program that listens, says so, and waits."""
    return f"""
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(({host!r}, {port}))
s.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [("0.0.0.0", "127.0.0.1", True), ("127.0.0.1", "0.0.0.0", True), ("127.0.0.1", "127.0.0.1", False)],
)
def test_reuse_of_an_address_lets_only_the_same_address_be_in_the_way(mac: Mac, one: str, other: str, shared: bool):
    (port,) = free_ports(1)
    first = mac.start(["-c", PRELUDE + listening(one, port)])
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "listening\n"
        second = mac.run(["-c", PRELUDE + listening(other, port)], timeout=60, input="")
    finally:
        first.communicate("")

    assert (second.stdout == "listening\n") is shared
    assert shared or "Address already in use" in second.stderr


def test_the_temporary_folder_is_as_long_as_a_macs_and_is_cleaned(mac: Mac):
    told(mac, "import tempfile; [Path(tempfile.gettempdir(), name).touch() for name in ('used', 'old')]")
    mac.let_days_pass(4)
    (mac.temporary / "used").touch()

    assert len(str(mac.temporary)) == len("/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T")
    removed = mac.clean_temporary_folder()

    assert "old" in removed
    assert "used" not in removed
    assert (mac.temporary / "used").exists()
    assert not (mac.temporary / "old").exists()
