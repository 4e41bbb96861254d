"""Settings of engine/: who it is, how large, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvplane.bootstrap import Address, BootstrapError, advertise, local
from kvplane.transfer import BACKENDS, why_unavailable
from kvplane.vocabulary import Role

from .cells import Sizes
from .errors import BadSetting
from .model import PAGE_TOKENS, REVISION, Size
from .nodes import Nodes

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


FOLLOW, ROUND_ROBIN = "follow_bootstrap_room", "round_robin"
METHODS = (FOLLOW, ROUND_ROBIN)  # room modulo dp; or in turn, and decodes ask the directory


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine process. Raises BadSetting where a value cannot be."""

    role: Role = Role.BOTH
    host: str = "127.0.0.1"  # HTTP, events, replay and transfer listen here
    port: int = 30000  # of the HTTP door, told to peers; the roof opens it
    advertise_host: str | None = None  # what peers dial; None = host, or ours that is routable
    bootstrap_host: str | None = None  # prefill: where its rank directory listens; None = host
    bootstrap_port: int = 8998
    bootstrap_key: str = field(default="", repr=False)  # what the directory wants of who registers
    open_writes: bool = False  # nodes of other hosts may join without that key
    events_port: int = 5557  # of dp rank 0, rank r is r higher; 0 = free ones
    replay_port: int = 5657  # the same; apart from events by more than any dp
    event_form: str = "vllm"  # whose form events have: vllm | sglang
    blocks: int = 512  # pages of each dp rank; 4 KiB each, so 2 MiB
    block_size: int = PAGE_TOKENS  # tokens; the tile of the decoder, cannot be another
    model: str = "tiny"  # also the seed of the weights
    context_length: int = 4096  # tokens, prompt and answer
    tp: int = 1  # ranks that share out the KV heads of a cache, each with its own rank port
    pp: int = 1  # the same for its layers
    dp: int = 1  # caches in this process, each with its own events and tp x pp ranks
    nnodes: int = 1  # processes that share out the tp x pp ranks of a prefill
    node_rank: int = 0  # which of them this is; node 0 has the door and the rank directory
    dist_init_addr: str | None = None  # host:port where node 0 gathers the others
    load_balance: str = FOLLOW  # how a prefill's dp rank is found where a request names none
    backend: str = "tcp"  # how pages travel: a name of transfer's table
    checksums: bool = True  # per page; off only to show that the model notices by itself
    faults: bool | None = None  # serve /fault and /truth; None = on loopback only
    name: str = ""  # who records stages; "" = role@host:port
    default_new_tokens: int = 128  # where a body names no limit, as SGLang
    slice_tokens: int = 256  # of a prompt at a time: about 15 ms before others get their turn
    most_waiting: int = 512  # samples that wait for pages; more are refused
    most_samples: int = 256  # prompts x n of one body
    most_body_bytes: int = 64 * 2**20
    queue_s: float = 60.0  # longest wait for pages
    room_s: float = 60.0  # longest meeting of one room, from complete KV (prefill) or bind (decode)
    rooms_kept: int = 10_000  # rooms whose stages are remembered
    buffer_batches: int = 10_000  # events kept for replay, as vLLM and SGLang
    register_every_s: float = 2.0  # asks the directory whether it still knows our ranks
    node_silent_s: float = 5.0  # a node that says nothing for so long is gone
    stop_s: float = 5.0  # work that has not ended by then is cut off

    def __post_init__(self) -> None:
        for name, least in (("blocks", 4), ("context_length", 32), ("dp", 1)):
            if getattr(self, name) < least:
                raise BadSetting(name, getattr(self, name), f"must be {least} or more")
        size = Size()
        for name, whole, what in (("tp", size.kv_heads, "KV heads"), ("pp", size.layers, "layers")):
            right = [str(part) for part in range(1, whole + 1) if whole % part == 0]
            if str(getattr(self, name)) not in right:
                want = f"must divide the {whole} {what} of this model: {', '.join(right)}"
                raise BadSetting(name, getattr(self, name), want)
        if self.backend not in BACKENDS:
            raise BadSetting("backend", self.backend, f"must be one of {', '.join(BACKENDS)}")
        why = why_unavailable(BACKENDS[self.backend])
        if why is not None:
            raise BadSetting("backend", self.backend, f"not available here: {why}")
        if self.role is Role.PREFILL and not 1 <= self.bootstrap_port <= 65535:
            want = "decodes must know it: 1 to 65535"
            raise BadSetting("bootstrap_port", self.bootstrap_port, want)
        if self.block_size != PAGE_TOKENS:
            raise BadSetting("block_size", self.block_size, f"must be {PAGE_TOKENS}")
        if self.load_balance not in METHODS:
            want = f"must be one of {', '.join(METHODS)}"
            raise BadSetting("load_balance_method", self.load_balance, want)
        if self.event_form not in ("vllm", "sglang"):
            raise BadSetting("event_form", self.event_form, "must be vllm or sglang")
        self._check_events()
        self._check_nodes()

    def _check_events(self) -> None:
        last = self.dp - 1
        for name in ("events_port", "replay_port"):
            if (port := getattr(self, name)) + last > 65535:
                want = f"must be {65535 - last} or less: dp rank {last} is {last} higher"
                raise BadSetting(name, port, want)
        apart = abs(self.events_port - self.replay_port)
        if self.events_port and self.replay_port and apart < self.dp:
            want = f"must be {self.dp} or more away from events_port = {self.events_port}"
            raise BadSetting("replay_port", self.replay_port, want)

    def _check_nodes(self) -> None:
        if self.nnodes == 1 and self.node_rank == 0:
            return
        if self.nnodes > 1 and self.role is not Role.PREFILL:
            want = f"only a prefill runs in several processes, and role = {self.role.value!r}"
            raise BadSetting("nnodes", self.nnodes, want)
        if self.nnodes < 1 or self.sizes.ranks % self.nnodes:
            want = f"must divide the {self.sizes.ranks} ranks of tp x pp"
            raise BadSetting("nnodes", self.nnodes, want)
        if not 0 <= self.node_rank < self.nnodes:
            right = f"must be 0 to {self.nnodes - 1}" if self.nnodes > 1 else "must be 0"
            want = f"{right} where nnodes = {self.nnodes}"
            raise BadSetting("node_rank", self.node_rank, want)
        self._check_meeting()

    def _check_meeting(self) -> None:
        what = "where node 0 gathers the others, the same on all nodes"
        if self.dist_init_addr is None:
            raise BadSetting("dist_init_addr", None, f"{what}: must be host:port")
        try:
            Address.parse(self.dist_init_addr)
        except BootstrapError as error:
            want = f"{what}: {error}"
            raise BadSetting("dist_init_addr", self.dist_init_addr, want) from error

    def settled(self) -> EngineSettings:
        """With the host that peers are told. Raises BadSetting where there is none to tell."""
        try:
            found = advertise(self.host, self.advertise_host)
        except BootstrapError as error:
            raise BadSetting("advertise_host", self.advertise_host, str(error)) from error
        return replace(self, advertise_host=found)

    @property
    def sizes(self) -> Sizes:
        """The grid of ranks."""
        return Sizes(self.tp, self.pp, self.dp)

    @property
    def nodes(self) -> Nodes:
        """How its ranks are shared out over processes."""
        return Nodes(self.sizes, self.nnodes, self.node_rank)

    @property
    def facts(self) -> dict[str, str]:
        """What must be equal on all nodes of a prefill."""
        names = "model tp pp dp blocks context_length backend checksums"
        found = {name: str(getattr(self, name)) for name in names.split()}
        return found | {"revision": str(REVISION)}

    @property
    def rank_names(self) -> list[str]:
        """What the ranks of this process are called, one after the other."""
        cells = (cell for dp in range(self.dp) for cell in self.nodes.cells(dp))
        return [self.sizes.name(cell) for cell in cells]

    @property
    def advertised(self) -> str:
        """The host that peers dial."""
        return self.advertise_host or local(self.host)

    @property
    def bootstrap_address(self) -> str:
        """host:port of the own rank directory."""
        return str(Address(local(self.bootstrap_host or self.host), self.bootstrap_port))

    @property
    def may_break(self) -> bool:
        """Are /fault and /truth served?"""
        return self.faults if self.faults is not None else self.host in LOOPBACK

    @property
    def known_as(self) -> str:
        """The name in stage records."""
        return self.name or f"{self.role.value}@{self.advertised}:{self.port}"
