/* run_data.h: a run as the page's script takes it, whole or what is new: one JSON object. Columns
 * of numbers are base64 of little-endian int32, float32 or bytes. One thread. */
#ifndef TOOLS_REPORT_RUN_DATA_H
#define TOOLS_REPORT_RUN_DATA_H

#include "common/base/bytes.h"
#include "tools/report/run_folder.h"

struct run_cursor { // what the page has; all zero: nothing
    int64_t generation, lines, samples, prompts, reports;
};

// Appends what it lacks:
//   name, generation, lines, bad (lines that could not be read), written (seconds since 1970),
//   behind (more samples are to come), config (null, or not there where the page has it)
//   from, steps [i32]           of the lines from that one on
//   series                      [{key, at [i32] or else first, values [f32]}]; at: line of each
//                               value, first: of the first, the others follow line by line
//   reports                     [{epoch, text, left_out (bytes of it behind text)}], left_out: how
//                               many between the first and the second are not given; not there
//                               where the page has them
//   samples                     {from, bad (lines that could not be read), step, row, line, number,
//                               tokens [i32], reward, advantage [f32], truncated [u8]}, prompts
//                               {from, line [i32], text}
enum status run_data_put(const struct run_folder *run, const struct run_cursor *has,
                         struct bytes *to);

#endif
