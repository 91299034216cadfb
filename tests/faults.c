/* Preloaded into a process: the Nth open, write, fsync, rename or mkdir below one directory fails, or a signal comes there.
 * Armed from Python (tests/faults.py) by fault_arm; inert until then. Linux, glibc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_FILES 4096
enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, MKDIR = 16, READ = 32 };

static char below[4096];
static int kinds, fault, for_ever, sent;
static long point, count;
static char is_ours[MOST_FILES];

/* The `nth` operation of these kinds below `directory` gives the error `number`, and so does each later one where `ever`.
 * Beyond that, a `number` below 0 is a signal that the process gets there, after which the operation is done. 0: none. */
void fault_arm(const char *directory, int which, long nth, int number, int ever) {
    strncpy(below, directory, sizeof below - 1);
    kinds = which; point = nth; fault = number; for_ever = ever; count = 0; sent = 0;
}
void fault_disarm(void) { kinds = 0; }
long fault_count(void) { return count; }
int fault_sent(void) { return sent; }

static int is_below(const char *path) {
    size_t length = strlen(below);
    return length && path && !strncmp(path, below, length) && (path[length] == '/' || !path[length]);
}
static int fails(int kind) {
    if (!(kinds & kind)) return 0;
    count++;
    if (count != point && !(for_ever && count > point)) return 0;
    sent++;
    if (fault < 0) { raise(-fault); return 0; }
    errno = fault;
    return 1;
}
static int is_file(int fd) { return kinds && fd >= 0 && fd < MOST_FILES && is_ours[fd]; }
static int opened(int fd, int ours) {
    if (fd >= 0 && fd < MOST_FILES) is_ours[fd] = (char)ours;
    return fd;
}
#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
static int kind_of(int flags) { return (flags & O_ACCMODE) == O_RDONLY ? READ : OPEN; }

#define OPENS(name) int name(const char *path, int flags, ...) { \
    NEXT(name); MODE \
    int ours = is_below(path); \
    if (ours && fails(kind_of(flags))) return -1; \
    return opened(next(path, flags, mode), ours); }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) int name(int folder, const char *path, int flags, ...) { \
    NEXT(name); MODE \
    int ours = is_below(path) || (path[0] != '/' && is_file(folder)); \
    if (ours && fails(kind_of(flags))) return -1; \
    return opened(next(folder, path, flags, mode), ours); }
OPENS_AT(openat)
OPENS_AT(openat64)
#define OPENS_FILE(name) FILE *name(const char *path, const char *mode) { \
    NEXT(name); \
    int ours = is_below(path); \
    if (ours && fails(strpbrk(mode, "wa+") ? OPEN : READ)) return NULL; \
    FILE *file = next(path, mode); \
    if (file) opened(fileno(file), ours); \
    return file; }
OPENS_FILE(fopen)
OPENS_FILE(fopen64)

/* The time of day leaps by so many seconds, there and back, each time that it is asked for; other clocks don't. */
static long leap;
void fault_clock(long seconds) { leap = seconds; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    static int there;
    int result = next(clock, now);
    if (leap && clock == CLOCK_REALTIME && (there = !there)) now->tv_sec += leap;
    return result;
}

int close(int fd) { NEXT(close); opened(fd, 0); return next(fd); }

/* A write that fails leaves the half of it, as a disk does that fills up. */
ssize_t write(int fd, const void *bytes, size_t size) {
    NEXT(write);
    if (is_file(fd) && fails(WRITE)) { int number = errno; if (size > 1 && !for_ever) next(fd, bytes, size / 2); errno = number; return -1; }
    return next(fd, bytes, size);
}
ssize_t writev(int fd, const struct iovec *parts, int many) {
    NEXT(writev);
    return is_file(fd) && fails(WRITE) ? -1 : next(fd, parts, many);
}
#define WRITES_AT(name, type) ssize_t name(int fd, const void *bytes, size_t size, type at) { \
    NEXT(name); return is_file(fd) && fails(WRITE) ? -1 : next(fd, bytes, size, at); }
WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)
ssize_t sendfile(int out, int in, off_t *at, size_t size) {
    NEXT(sendfile);
    return is_file(out) && fails(WRITE) ? -1 : next(out, in, at, size);
}
ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
    NEXT(sendfile64);
    return is_file(out) && fails(WRITE) ? -1 : next(out, in, at, size);
}
#define CUTS(name, type) int name(int fd, type size) { \
    NEXT(name); return is_file(fd) && fails(WRITE) ? -1 : next(fd, size); }
CUTS(ftruncate, off_t)
CUTS(ftruncate64, off64_t)
#define SYNCS(name) int name(int fd) { NEXT(name); return is_file(fd) && fails(SYNC) ? -1 : next(fd); }
SYNCS(fsync)
SYNCS(fdatasync)
int rename(const char *from, const char *to) {
    NEXT(rename);
    return (is_below(from) || is_below(to)) && fails(RENAME) ? -1 : next(from, to);
}
int renameat(int old, const char *from, int new, const char *to) {
    NEXT(renameat);
    return (is_below(from) || is_below(to)) && fails(RENAME) ? -1 : next(old, from, new, to);
}
int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    return is_below(path) && fails(MKDIR) ? -1 : next(path, mode);
}
