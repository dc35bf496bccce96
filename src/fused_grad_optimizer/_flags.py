"""Which parameters were left untouched because their gradient was not finite, learnt without waiting for the device."""

from __future__ import annotations

from collections import Counter

import torch


class SkipFlags:
    """One int32 flag for each parameter and device, set by the finite check and read by the step kernels.

    At the end of a pass the flags are copied to pinned memory; the next pass reads them, when that copy is long done.
    On the CPU they are known at once.

    Attributes:
        counts: skipped updates by parameter index.
        generation: changes when flags move to other memory.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.generation = 0
        self._flags: dict[torch.device, torch.Tensor] = {}  # [parameters, 4]: flags lie 16 bytes apart
        self._host: set[int] = set()
        self._pending: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def begin(self) -> None:
        for flags in self._flags.values():
            flags.zero_()

    def of(self, index: int, device: torch.device) -> torch.Tensor:
        """The flag (int32, one element, 0 at the start of a pass) of a parameter."""
        return self.all(index, device)[index]

    def all(self, largest: int, device: torch.device) -> torch.Tensor:
        """The flags of all parameters on a device, by index, at least up to index `largest`.

        All are aligned alike: Triton compiles a kernel anew for addresses that are not.
        """
        flags = self._flags.get(device)
        if flags is None or flags.shape[0] <= largest:
            grown = torch.zeros(max(64, 2 * (largest + 1)), 4, dtype=torch.int32, device=device)
            if flags is not None:
                grown[: flags.shape[0]] = flags
            self._flags[device] = flags = grown
            self.generation += 1
        return flags[:, 0]

    def skipped_on_host(self, index: int) -> None:
        self._host.add(index)

    @property
    def known(self) -> bool:
        """Whether there are skips that the host knows already."""
        return bool(self._host)

    def end(self) -> None:
        for device, flags in self._flags.items():
            if device.type == "cuda":
                copy = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
                copy.copy_(flags, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._pending.append((copy, event))

    def restart(self) -> None:
        """Within a pass: `collect` is to know what was skipped so far. Waits for the device."""
        self._wait()  # other streams than the current one may set flags
        self.end()
        self.begin()
        self._wait()

    def _wait(self) -> None:
        for device in self._flags:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def collect(self) -> dict[int, str]:
        """Skips since the last call: parameter index -> "host" or "device" (the step count must go back by one)."""
        found = dict.fromkeys(self._host, "host")
        self._host = set()
        pending, self._pending = self._pending, []
        for flags, event in pending:
            event.synchronize()
            if bool(flags.any()):
                for index in flags[:, 0].nonzero().flatten().tolist():
                    found.setdefault(index, "device")
        self.counts.update(found.keys())
        return found
