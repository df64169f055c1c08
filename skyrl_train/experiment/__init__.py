"""Builds a run from its configuration, starts it and ends it.

The modules, in the order in which a run uses them:

- `base`: the `Experiment` class, whose `get_*` and `build_*` methods a program can override, and `run_experiment`
- `driver`: the driver process: signals, garbage collection, and the report of a failure
- `plugins`, `preflight`: checks before anything is started
- `data`, `environments`, `algorithm`: tokenizer and prompts, environment settings, losses and advantages
- `memory_plan`, `memory_fit`: the predicted memory of every slot, and the sizes that are chosen to fit it
- `services`: everything that a run starts, in order; each kind of process is built by `layout` (its slots), `learner`
  and `engines`
- `trainer`: the training loop over what has been started; `publisher`: its weight syncs
- `restarts`: another attempt on the nodes that are left after a rank was lost
- `export`: a model from a checkpoint
"""
