/* merge.h: `cw-trainer merge`: a LoRA adapter and its base as one model folder. */
#ifndef TRAINER_MERGE_H
#define TRAINER_MERGE_H

int merge_main(int argc, char **argv); // exit status

#endif
