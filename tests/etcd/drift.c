/*
 * Simulated time for one chronyd: preloaded into it, so that an hour of its life takes seconds.
 *
 * Every reading of a clock comes from here, and time passes only while the process waits in
 * select(): it then names to the simulation (drift.rs) the end of its wait, and goes on at the
 * time in the answer, or once a packet is there. The sockets are real ones on the loopback device.
 *
 *   process --> simulation   struct waiting, whenever there is nothing to do
 *   simulation --> process   the time, in nanoseconds since the beginning
 *
 * The oscillator is faster than true time by POLIS_SIM_PPB parts in a billion, and the kernel's
 * clock follows it with the frequency that adjtimex(2) sets, as Linux' does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* A reading of a clock takes this long, so that no loop waits for it without end. */
#define READING 200
/* A packet is on its way for this long, and for up to so much longer. */
#define WAY 100000
#define JITTER 500000

struct waiting {
    uint64_t deadline; /* nanoseconds; as now */
    uint64_t now;
    uint64_t ran;      /* whether it did something since the last answer */
    double error;      /* seconds that its clock is ahead of true time, at now */
    double rate;       /* seconds by which that grows in a second */
};

static int simulation = -1;
static uint64_t base, now, numbers;
static double drift, frequency; /* shares of one */
static double error_then;
static uint64_t then;

static double rate(void) {
    return (1.0 + drift) * (1.0 + frequency) - 1.0;
}

static double error_now(void) {
    return error_then + (double)(now - then) * 1e-9 * rate();
}

static void change(double error, double new_frequency) {
    error_then = error;
    then = now;
    frequency = new_frequency;
}

static uint64_t number_of(const char *name) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : 0;
}

static void fail(const char *what) {
    (void)!write(2, what, strlen(what));
    _exit(99);
}

__attribute__((constructor)) static void begin(void) {
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    const char *path = getenv("POLIS_SIM_SOCKET");
    if (!path || strlen(path) >= sizeof at.sun_path)
        fail("no socket of a simulation\n");
    strcpy(at.sun_path, path);
    base = number_of("POLIS_SIM_BASE");
    drift = ((double)number_of("POLIS_SIM_PPB") - 1e6) * 1e-9;
    numbers = number_of("POLIS_SIM_NUMBER") + 1;
    simulation = (int)syscall(SYS_socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (syscall(SYS_connect, simulation, &at, sizeof at) != 0)
        fail("no simulation\n");
}

static int64_t realtime(void) {
    now += READING;
    return (int64_t)(base + now) + (int64_t)(error_now() * 1e9);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int64_t time;
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
        time = realtime();
        break;
    default:
        now += READING;
        time = (int64_t)((double)now * (1.0 + drift));
    }
    at->tv_sec = time / 1000000000;
    at->tv_nsec = time % 1000000000;
    return 0;
}

int gettimeofday(struct timeval *at, void *zone) {
    int64_t time = realtime();
    (void)zone;
    at->tv_sec = time / 1000000000;
    at->tv_usec = time % 1000000000 / 1000;
    return 0;
}

time_t time(time_t *at) {
    time_t seconds = realtime() / 1000000000;
    if (at)
        *at = seconds;
    return seconds;
}

int settimeofday(const struct timeval *at, const struct timezone *zone) {
    (void)zone;
    if (at) {
        double ahead = (double)(at->tv_sec - (int64_t)((base + now) / 1000000000));
        ahead += (double)at->tv_usec * 1e-6 - (double)((base + now) % 1000000000) * 1e-9;
        change(ahead, frequency);
    }
    return 0;
}

int adjtimex(struct timex *asked) {
    static struct timex kernel = { .tick = 10000, .status = STA_UNSYNC };
    double error = error_now();
    if (asked->modes != ADJ_OFFSET_SINGLESHOT && asked->modes != ADJ_OFFSET_SS_READ) {
        if (asked->modes & ADJ_STATUS)
            kernel.status = asked->status;
        if (asked->modes & ADJ_FREQUENCY)
            kernel.freq = asked->freq;
        if (asked->modes & ADJ_TICK)
            kernel.tick = asked->tick;
        if (asked->modes & ADJ_SETOFFSET) {
            double part = (asked->modes & ADJ_NANO) ? 1e-9 : 1e-6;
            error += (double)asked->time.tv_sec + (double)asked->time.tv_usec * part;
        }
        if ((asked->modes & ADJ_OFFSET) && asked->offset != 0)
            fail("an offset that the simulation does not slew\n");
        change(error, (double)(kernel.tick - 10000) * 1e-4 + (double)kernel.freq / 65536e6);
    }
    kernel.modes = asked->modes;
    kernel.tolerance = 32768000;
    kernel.precision = 1;
    *asked = kernel;
    gettimeofday(&asked->time, NULL);
    return kernel.status & STA_UNSYNC ? TIME_ERROR : TIME_OK;
}

/* The time of a packet is that of its reading. */
int setsockopt(int socket, int level, int option, const void *value, socklen_t length) {
    if (level == SOL_SOCKET
        && (option == SO_TIMESTAMP || option == SO_TIMESTAMPNS || option == SO_TIMESTAMPING)) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return (int)syscall(SYS_setsockopt, socket, level, option, value, length);
}

/* Others receive it only once this process waits, at its time by then. */
static void travels(void) {
    numbers ^= numbers << 13;
    numbers ^= numbers >> 7;
    numbers ^= numbers << 17;
    now += WAY + numbers % JITTER;
}

ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    ssize_t sent = syscall(SYS_sendmsg, socket, message, flags);
    int error = errno;
    travels();
    errno = error;
    return sent;
}

static int ready(int count, fd_set *sets[3], const fd_set kept[3]) {
    struct timespec none = { 0, 0 };
    for (int set = 0; set < 3; set++)
        if (sets[set])
            *sets[set] = kept[set];
    return (int)syscall(SYS_pselect6, count, sets[0], sets[1], sets[2], &none, NULL);
}

int select(int count, fd_set *reads, fd_set *writes, fd_set *others, struct timeval *wait) {
    fd_set *sets[3] = { reads, writes, others };
    fd_set kept[3];
    struct waiting waiting = { .ran = 1 };
    for (int set = 0; set < 3; set++)
        if (sets[set])
            kept[set] = *sets[set];
    waiting.deadline = UINT64_MAX;
    if (wait)
        waiting.deadline = now + (uint64_t)wait->tv_sec * 1000000000 + (uint64_t)wait->tv_usec * 1000;
    for (;;) {
        uint64_t at;
        int found;
        waiting.now = now;
        waiting.error = error_now();
        waiting.rate = rate();
        if (syscall(SYS_write, simulation, &waiting, sizeof waiting) != sizeof waiting
            || syscall(SYS_read, simulation, &at, sizeof at) != sizeof at)
            _exit(0); /* the end of the simulation */
        if (at > now)
            now = at;
        found = ready(count, sets, kept);
        if (found != 0 || now >= waiting.deadline)
            return found;
        waiting.ran = 0;
    }
}
