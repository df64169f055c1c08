"""`scripts/gpu_check`: what only a GPU can show, part by part. See docs/gpu.md.

- __main__.py            the command
- campaign.py            runs parts, each in a process of its own with a deadline; keeps and prints results
- report.py              what a part tells
- parts.py               the parts, in order
- environment.py ...     one module for each part
"""
