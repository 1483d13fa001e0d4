/* A preloaded library that counts a process's system calls on files in one folder, and lets the n-th call fail.

   cc -shared -fPIC -O1 -o faults.so faults.c -ldl;  LD_PRELOAD=faults.so python ...
   syscalls.py calls faults_arm(), which sets the folder, the numbers of the calls and the kind of failure. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

enum { NOTHING, FAILS, IS_DONE, IS_SHORT, KILLS };

static char root[4096], hit[8192];
static size_t length;
static long count, first, second;
static int how, code, armed;
static unsigned char ours[1 << 16];

void faults_arm(const char *folder, long n, long m, int what, int number)
{
    snprintf(root, sizeof root, "%s", folder);
    length = strlen(root);
    count = 0, first = n, second = m, how = what, code = number, hit[0] = 0, armed = 1;
}

long faults_disarm(void)
{
    armed = 0;
    return count;
}

const char *faults_hit(void) { return hit; }

static int is_ours(const char *path)
{
    return armed && path && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int is_open(int fd) { return armed && fd >= 0 && fd < (int)sizeof ours && ours[fd]; }

static int remember(int fd, const char *path)
{
    if (fd >= 0 && fd < (int)sizeof ours)
        ours[fd] = is_ours(path);
    return fd;
}

static int decide(const char *name, const char *path)
{
    long n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (n != first && n != second)
        return NOTHING;
    size_t used = strlen(hit);
    snprintf(hit + used, sizeof hit - used, "%s%s %s", used ? "; " : "", name, path ? path + length : "(open file)");
    if (how == KILLS)
        kill(getpid(), SIGKILL);
    return how;
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
/* Make the call, and let it fail before (FAILS, IS_SHORT) or after (IS_DONE) it has an effect. */
#define ANSWER(applies, name, path, call)                                                     \
    do {                                                                                      \
        int what = (applies) ? decide(name, path) : NOTHING;                                  \
        if (what == FAILS || what == IS_SHORT) { errno = code; return -1; }                   \
        if (what == IS_DONE) { if ((call) < 0) return -1; errno = code; return -1; }          \
        return call;                                                                          \
    } while (0)

#define OPEN(name)                                                                            \
    int name(const char *path, int flags, ...)                                                \
    {                                                                                         \
        REAL(int, name, const char *, int, ...);                                              \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (is_ours(path) && decide("open", path)) { errno = code; return -1; }               \
        return remember(real(path, flags, mode), path);                                          \
    }
#define OPENAT(name)                                                                          \
    int name(int at, const char *path, int flags, ...)                                        \
    {                                                                                         \
        REAL(int, name, int, const char *, int, ...);                                         \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (is_ours(path) && decide("open", path)) { errno = code; return -1; }               \
        return remember(real(at, path, flags, mode), path);                                      \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define MOVE(name, word, buffer, more, pass)                                                  \
    ssize_t name(int fd, buffer data, size_t size more)                                       \
    {                                                                                         \
        REAL(ssize_t, name, int, buffer, size_t more);                                        \
        int what = is_open(fd) ? decide(word, NULL) : NOTHING;                                \
        if (what == IS_SHORT && size > 1) return real(fd, data, (size + 1) / 2 pass);         \
        if (what == FAILS || what == IS_SHORT) { errno = code; return -1; }                   \
        ssize_t moved = real(fd, data, size pass);                                            \
        if (what == IS_DONE) { errno = code; return -1; }                                     \
        return moved;                                                                         \
    }
#define COMMA ,
MOVE(read, "read", void *, , )
MOVE(write, "write", const void *, , )
MOVE(pread, "pread", void *, COMMA off_t at, COMMA at)
MOVE(pread64, "pread", void *, COMMA off_t at, COMMA at)
MOVE(pwrite, "pwrite", const void *, COMMA off_t at, COMMA at)
MOVE(pwrite64, "pwrite", const void *, COMMA off_t at, COMMA at)

int fsync(int fd) { REAL(int, fsync, int); ANSWER(is_open(fd), "fsync", NULL, real(fd)); }
int fdatasync(int fd) { REAL(int, fdatasync, int); ANSWER(is_open(fd), "fdatasync", NULL, real(fd)); }
int fchmod(int fd, mode_t mode) { REAL(int, fchmod, int, mode_t); ANSWER(is_open(fd), "fchmod", NULL, real(fd, mode)); }
int flock(int fd, int op) { REAL(int, flock, int, int); ANSWER(is_open(fd), "flock", NULL, real(fd, op)); }
int ftruncate64(int fd, off_t size) { REAL(int, ftruncate64, int, off_t); ANSWER(is_open(fd), "ftruncate", NULL, real(fd, size)); }
int ftruncate(int fd, off_t size) { REAL(int, ftruncate, int, off_t); ANSWER(is_open(fd), "ftruncate", NULL, real(fd, size)); }
int fstat(int fd, struct stat *s) { REAL(int, fstat, int, struct stat *); ANSWER(is_open(fd), "fstat", NULL, real(fd, s)); }
int fstat64(int fd, struct stat64 *s) { REAL(int, fstat64, int, struct stat64 *); ANSWER(is_open(fd), "fstat", NULL, real(fd, s)); }
int stat(const char *p, struct stat *s) { REAL(int, stat, const char *, struct stat *); ANSWER(is_ours(p), "stat", p, real(p, s)); }
int stat64(const char *p, struct stat64 *s) { REAL(int, stat64, const char *, struct stat64 *); ANSWER(is_ours(p), "stat", p, real(p, s)); }
int lstat(const char *p, struct stat *s) { REAL(int, lstat, const char *, struct stat *); ANSWER(is_ours(p), "lstat", p, real(p, s)); }
int lstat64(const char *p, struct stat64 *s) { REAL(int, lstat64, const char *, struct stat64 *); ANSWER(is_ours(p), "lstat", p, real(p, s)); }
int statvfs64(const char *p, struct statvfs64 *s) { REAL(int, statvfs64, const char *, struct statvfs64 *); ANSWER(is_ours(p), "statvfs", p, real(p, s)); }
int mkdir(const char *p, mode_t mode) { REAL(int, mkdir, const char *, mode_t); ANSWER(is_ours(p), "mkdir", p, real(p, mode)); }
int rmdir(const char *p) { REAL(int, rmdir, const char *); ANSWER(is_ours(p), "rmdir", p, real(p)); }
int unlink(const char *p) { REAL(int, unlink, const char *); ANSWER(is_ours(p), "unlink", p, real(p)); }
int rename(const char *p, const char *q) { REAL(int, rename, const char *, const char *); ANSWER(is_ours(p), "rename", p, real(p, q)); }

int fstatat64(int at, const char *p, struct stat64 *s, int flags)
{
    REAL(int, fstatat64, int, const char *, struct stat64 *, int);
    ANSWER(is_ours(p), "stat", p, real(at, p, s, flags));
}

int fstatat(int at, const char *p, struct stat *s, int flags)
{
    REAL(int, fstatat, int, const char *, struct stat *, int);
    ANSWER(is_ours(p), "stat", p, real(at, p, s, flags));
}

int close(int fd) /* Like Linux, close the file even if the call reports an error. */
{
    REAL(int, close, int);
    int was = is_open(fd), what = was ? decide("close", NULL) : NOTHING;
    if (fd >= 0 && fd < (int)sizeof ours)
        ours[fd] = 0;
    int answer = real(fd);
    if (what != NOTHING && answer == 0) { errno = code; return -1; }
    return answer;
}

DIR *opendir(const char *path)
{
    REAL(DIR *, opendir, const char *);
    if (is_ours(path) && decide("opendir", path)) { errno = code; return NULL; }
    return real(path);
}

void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    REAL(void *, mmap64, void *, size_t, int, int, int, off_t);
    if (fd >= 0 && is_open(fd) && decide("mmap", NULL)) { errno = code; return MAP_FAILED; }
    return real(at, size, protection, flags, fd, offset);
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    REAL(void *, mmap, void *, size_t, int, int, int, off_t);
    if (fd >= 0 && is_open(fd) && decide("mmap", NULL)) { errno = code; return MAP_FAILED; }
    return real(at, size, protection, flags, fd, offset);
}
