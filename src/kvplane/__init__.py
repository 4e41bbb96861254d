"""kvplane: a global KV index control plane. What can be imported is listed in each package."""

__version__ = "0.1.0"
