/* eval.h: `cw-trainer eval`. */
#ifndef TRAINER_EVAL_H
#define TRAINER_EVAL_H

int eval_main(int argc, char **argv); // exit status

#endif
