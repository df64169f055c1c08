"""Builds a run from its configuration, starts it and ends it.

The modules, in the order in which a run uses them:

- `base`: the `Experiment` class, whose `get_*` and `build_*` methods a program can override, and `run_experiment`
- `driver`: the driver process: signals, garbage collection, and the report of a failure
- `plugins`, `preflight`: checks before anything is started
- `data`, `environments`, `algorithm`: tokenizer and prompts, environment settings, losses and advantages
- `memory_plan`, `memory_tuning`: the predicted memory of every slot, and the sizes that are chosen to fit it
- `run_resources`: everything that a run starts, in order; `placement` reserves the slots, `learner` and `engines`
  start the processes on them
- `trainer`: the training loop over the started resources; `publisher`: its weight syncs
- `restarts`: another attempt on the remaining nodes after a rank was lost
- `export`: writes a checkpoint's policy as a model
"""
