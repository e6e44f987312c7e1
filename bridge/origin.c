/* origin.c: what the weights are, in words for people: the trainer's log and cw-ipc-check. No
 * state. */
#include "bridge/control.h"

#include <inttypes.h>

void control_origin_words(const struct control_facts *f, struct bytes *ret)
{
    bytes_printf(ret, "version %" PRIu64 ", ", f->version);
    if (!f->updates) {
        bytes_printf(ret, "those of %s", f->origin);
        return;
    }
    bytes_printf(ret, "%" PRIu64 " update%s since %s", f->updates, f->updates == 1 ? "" : "s",
                 f->origin);
    if (f->run_updates < f->updates)
        bytes_printf(ret, ", the last %" PRIu64 " of them", f->run_updates);
    if (f->run[0])
        bytes_printf(ret, " by the run %s", f->run);
    else
        bytes_puts(ret, " by a writer without a run folder");
}
