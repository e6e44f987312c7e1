/* download.c: see runs.h. A state machine of the file that is open, what of it is not read yet,
 * and which comes after it. */
#include "trainer/serve/runs.h"
#include "common/base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHUNK_BYTES (256 << 10)
#define TAR_BLOCK   512
#define TAR_END     (2 * TAR_BLOCK) // zeros

struct download {
    char folder[PATH_ROOM], path[PATH_ROOM]; // path: of the open file
    int folder_fd; // what is saved over it meanwhile is another folder, of which nothing is read
    json_t *files;
    void *next;   // of files; NULL: all were opened
    int fd;       // -1: none
    int64_t left; // bytes of it
    int padding;  // behind it
    bool archive;
    bool ended;
};

static int padding_of(int64_t n_bytes)
{
    return (int)(-n_bytes & (TAR_BLOCK - 1));
}

enum status download_new(const char *folder, const json_t *files, const char *file,
                         struct download **ret, int64_t *ret_bytes)
{
    const char *name;
    json_t *size;
    enum status st = ST_OK;
    struct download *d = calloc(1, sizeof *d);
    if (!d) return status_fail(ST_NO_MEMORY, "out of memory");
    d->fd = -1;
    d->folder_fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (d->folder_fd < 0) FAIL(ST_NOT_FOUND, "%s: %s", folder, strerror(errno));
    if (!(d->files = json_object())) FAIL(ST_NO_MEMORY, "out of memory");
    snprintf(d->folder, sizeof d->folder, "%s", folder);
    d->archive = !*file;
    int64_t n_bytes = d->archive ? TAR_END : 0;
    json_object_foreach ((json_t *)files, name, size) {
        const int64_t n = json_integer_value(size);
        if (!d->archive && strcmp(name, file) != 0) continue;
        json_object_set(d->files, name, size);
        n_bytes += d->archive ? TAR_BLOCK + n + padding_of(n) : n;
    }
    if (!(d->next = json_object_iter(d->files)))
        FAIL(ST_NOT_FOUND, "there is no file \"%.100s\" in %s", file, folder);
    *ret = d;
    *ret_bytes = n_bytes;
    d = NULL;
out:
    download_free(d);
    return st;
}

void download_free(struct download *d)
{
    if (!d) return;
    if (d->fd >= 0) close(d->fd);
    if (d->folder_fd >= 0) close(d->folder_fd);
    json_decref(d->files);
    free(d);
}

// ---- tar ----------------------------------------------------------------------------------------

struct tar_header { // all text, octal numbers with a NUL behind them
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100],
        magic[6], version[2], user[32], group[32], major[8], minor[8], prefix[155], unused[12];
};
_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a header is one block");

// Eleven octal digits hold less than 8 GiB; beyond, a set bit and the number in big-endian bytes.
static void put_size(int64_t n_bytes, char ret[12])
{
    if (n_bytes < (int64_t)1 << 33) {
        snprintf(ret, 12, "%011llo", (unsigned long long)n_bytes);
        return;
    }
    for (int i = 11; i > 0; i--, n_bytes >>= 8) ret[i] = (char)(n_bytes & 255);
    ret[0] = (char)0x80;
}

static enum status put_header(const char *name, const struct stat *info, struct bytes *to)
{
    struct tar_header h = {.type = '0', .magic = "ustar", .version = {'0', '0'}};
    unsigned sum = 0;
    if (strlen(name) >= sizeof h.name)
        return status_fail(ST_UNSUPPORTED, "%s: the name is too long for an archive", name);
    memcpy(h.name, name, strlen(name));
    snprintf(h.mode, sizeof h.mode, "%07o", 0644);
    snprintf(h.uid, sizeof h.uid, "%07o", 0);
    snprintf(h.gid, sizeof h.gid, "%07o", 0);
    put_size(info->st_size, h.size);
    put_size(info->st_mtime, h.mtime);
    memset(h.checksum, ' ', sizeof h.checksum);
    for (size_t i = 0; i < sizeof h; i++) sum += ((const unsigned char *)&h)[i];
    snprintf(h.checksum, sizeof h.checksum, "%06o", sum);
    bytes_append(to, &h, sizeof h);
    return ST_OK;
}

static void put_zeros(int n, struct bytes *to)
{
    static const char zeros[TAR_END];
    bytes_append(to, zeros, (size_t)n);
}

// ---- chunks -------------------------------------------------------------------------------------

static enum status open_next(struct download *d, struct bytes *to)
{
    const char *name = json_object_iter_key(d->next);
    const int64_t size = json_integer_value(json_object_iter_value(d->next));
    struct stat info;
    enum status st;
    d->next = json_object_iter_next(d->files, d->next);
    CHECK(path_put(d->path, d->folder, "%s", name));
    d->fd = openat(d->folder_fd, name, O_RDONLY | O_CLOEXEC);
    if (d->fd < 0 || fstat(d->fd, &info) != 0) FAIL(ST_IO, "%s: %s", d->path, strerror(errno));
    if (info.st_size != size) FAIL(ST_IO, "%s: is another file than before", d->path);
    d->left = size;
    if (!d->archive) goto out;
    d->padding = padding_of(size);
    st = put_header(name, &info, to);
out:
    return st;
}

static enum status read_chunk(struct download *d, struct bytes *to)
{
    const size_t want = d->left < CHUNK_BYTES ? (size_t)d->left : CHUNK_BYTES;
    if (!bytes_reserve(to, want)) return bytes_status(to);
    const ssize_t n = want ? read(d->fd, to->data + to->len, want) : 0;
    if (n < 0 || (n == 0 && want))
        return status_fail(ST_IO, "%s: %s", d->path, n ? strerror(errno) : "ends early");
    to->len += (size_t)n;
    d->left -= n;
    if (d->left > 0) return ST_OK;
    put_zeros(d->padding, to);
    close(d->fd);
    d->fd = -1;
    return ST_OK;
}

enum stream_state download_next(struct download *d, struct bytes *to)
{
    enum status st = ST_OK;
    if (d->ended) return STREAM_END;
    if (d->fd < 0 && d->next) st = open_next(d, to);
    if (st == ST_OK && d->fd >= 0) st = read_chunk(d, to);
    if (st != ST_OK) return STREAM_FAIL;
    d->ended = d->fd < 0 && !d->next;
    if (d->ended && d->archive) put_zeros(TAR_END, to);
    return d->ended ? STREAM_END : STREAM_MORE;
}

// ---- signatures -------------------------------------------------------------------------------

enum status signing_key_new(struct signing_key *ret)
{
    if (getrandom(ret->bytes, sizeof ret->bytes, 0) == sizeof ret->bytes) return ST_OK;
    return status_fail(ST_IO, "the system has no random numbers to sign URLs by");
}

// It is the HMAC-SHA256 of the time and the name.
void signature_text(const struct signing_key *key, const char *name, int64_t expires_s,
                    char ret[SIGNATURE_ROOM])
{
    unsigned char name_hash[HASH_SHA256_BYTES], text[sizeof expires_s + sizeof name_hash],
        digest[EVP_MAX_MD_SIZE] = {0};
    hash_sha256(name, strlen(name), name_hash);
    memcpy(text, &expires_s, sizeof expires_s);
    memcpy(text + sizeof expires_s, name_hash, sizeof name_hash);
    HMAC(EVP_sha256(), key->bytes, sizeof key->bytes, text, sizeof text, digest, NULL);
    int n = snprintf(ret, SIGNATURE_ROOM, "%" PRId64 "-", expires_s);
    for (int i = 0; i < HASH_SHA256_BYTES; i++, n += 2) snprintf(ret + n, 3, "%02x", digest[i]);
}

bool signature_is(const char *given, const char *wanted)
{
    const size_t n = strlen(wanted);
    return strlen(given) == n && CRYPTO_memcmp(given, wanted, n) == 0;
}
