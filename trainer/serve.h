/* serve.h: the command `cw-trainer serve`. */
#ifndef TRAINER_SERVE_H
#define TRAINER_SERVE_H

int serve_main(int argc, char **argv); // exit status

#endif
