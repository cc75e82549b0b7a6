/* A clock that can be put forth and back for the processes of one study: preloaded, it adds the seconds in the file
   that DHEN_CLOCK names to the time of day. Monotonic time goes on as it does. Who waits until a time of day is woken
   by the system's clock, so the seconds are taken off again there. (libfaketime does this too, but its clock_nanosleep
   fails where monotonic time is left alone, and with it each time.sleep of Python.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const time_t YEARS = 1000000000; /* deadlines below this are of a monotonic clock */

static time_t jumped(void) {
    const char *path = getenv("DHEN_CLOCK");
    char text[32] = {0};
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jumped();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}

static struct timespec of_the_system(const struct timespec *deadline) {
    struct timespec real = *deadline;
    if (real.tv_sec > YEARS) real.tv_sec -= jumped();
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec real = of_the_system(deadline);
    if (!wait) *(void **)&wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    return wait(condition, mutex, &real);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    static int (*wait)(sem_t *, const struct timespec *);
    struct timespec real = of_the_system(deadline);
    if (!wait) *(void **)&wait = dlsym(RTLD_NEXT, "sem_timedwait");
    return wait(semaphore, &real);
}
