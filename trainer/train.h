/* train.h: `cw-trainer train`. */
#ifndef TRAINER_TRAIN_H
#define TRAINER_TRAIN_H

int train_main(int argc, char **argv); // exit status

#endif
