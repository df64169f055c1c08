"""A run, built from its configuration. The modules, in the order in which a run needs them:

- `base`: the Experiment, whose methods build the parts, and how a program runs it
- `driver`: the process around it: signals, garbage collection, what is printed when it fails
- `plugins`, `preflight`: checks before anything is started
- `data`, `environments`, `algorithm`: tokenizer and prompts, settings of environments, losses and advantages
- `memory_plan`, `memory_fit`: what every slot will hold, and the sizes that are chosen by it
- `layout`, `learner`, `engines`: slots, and the processes in them
- `services`: all that is started, in order
- `publisher`, `trainer`: weight syncs, and the loop over what has been started
- `restarts`: another start on what is left after a rank was lost
- `export`: a model from one of its checkpoints
"""
