"""`scripts/gpu_check`: checks that need a GPU, part by part. See docs/contributing/gpu_checks.md.

- __main__.py            the command
- campaign.py            runs each part in a separate process with a deadline; stores and prints results
- report.py              results of a part
- parts.py               the parts, in order
- environment.py ...     one module for each part
"""
