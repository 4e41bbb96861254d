"""nixl_transports: may a peer write into our memory without a thread of ours?

Pure. Used by nixl.py. UCX takes the first transport both sides allow; some copy from process to
process in the kernel or over a mapped GPU buffer, and such a writer is not stopped by the end of
our agent. Open it when UCX gets another transport of that kind.

    ^cma,xpmem,...   everything but these: fine when all of ours are named
    tcp,sysv         these only: fine when none of ours is among them, nor a group that holds one
"""

from __future__ import annotations

BY_ITSELF = ("cma", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc")
GROUPS = {  # names of several at once
    "all": BY_ITSELF,
    "sm": ("cma", "xpmem", "knem"),
    "shm": ("cma", "xpmem", "knem"),
    "mm": ("xpmem",),
    "cuda": ("cuda_ipc",),
    "rocm": ("rocm_ipc",),
    "ze": ("ze_ipc",),
}
SAFE = "^" + ",".join(BY_ITSELF)


def by_itself(tls: str) -> tuple[str, ...]:
    """Transports of that kind that this value of UCX_TLS lets through; () = none."""
    names = [name.strip() for name in tls.removeprefix("^").split(",") if name.strip()]
    named = {each.lstrip("\\") for name in names for each in (*GROUPS.get(name, ()), name)}
    if tls.startswith("^"):
        return tuple(name for name in BY_ITSELF if name not in named)
    if not names:
        return BY_ITSELF
    return tuple(name for name in BY_ITSELF if name in named)
