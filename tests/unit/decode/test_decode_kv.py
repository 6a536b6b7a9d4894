"""The paged, hot-buffered store gives the model bit by bit what a plain store gives it."""

import pytest
import torch
from torch import Tensor

from common.kernels.cpu import cpu_kernels
from common.kernels.page_views import data_words, scale_bytes
from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, WINDOW_PAGE
from common.kv.quantise import quantise_rows
from common.model.config import ModelConfig
from common.model.kv_store import CacheKind
from common.model.small_checkpoint import small_config
from decode_service.decode_kv import BatchTables, PagedDecodeKV
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import RequestResources, ResourcePools
from tests.support.local_kv import LocalBatch, LocalSequence

CONFIG = ModelConfig.from_dict(small_config(index_topk=8))
KERNELS = cpu_kernels()
WIDTHS = {CacheKind.C4: 2048, CacheKind.INDEX: 512, CacheKind.C128: 1024}
D = 8


class Pair:
    """The same sequences in both stores, fed the same random rows."""

    def __init__(self, lengths: list[int], steps: int, hot_entries: int, seed: int, resident: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), 40, KERNELS, seed)
        self.device = DevicePools.of(CONFIG, 40, 6, seed)
        # Whatever earlier requests left behind must not show.
        for buffer in (*self.host.buffers.values(), *self.device.index.values(), *self.device.c128.values()):
            buffer.random_(0, 100, generator=self.generator)
        self.hisparse = HiSparseCoordinator(self.host, KERNELS, 6, hot_entries, seed, resident_pages=resident)
        self.pools = ResourcePools(self.host, self.device, self.hisparse.slots)
        self.resources: list[RequestResources] = []
        self.local = [LocalSequence(CONFIG) for _ in lengths]
        for length, sequence in zip(lengths, self.local, strict=True):
            resources = self.pools.reserve(length + steps)
            assert resources is not None
            self.resources.append(resources)
            self._hand_over(sequence, resources, length)
            self.hisparse.admit_request_direct(resources, length)
        self.batch = LocalBatch(self.local)
        self.tables = BatchTables.of(self.resources)

    def rows(self, count: int, width: int) -> Tensor:
        return torch.randn(count, width, generator=self.generator)

    def _hand_over(self, sequence: LocalSequence, resources: RequestResources, length: int) -> None:
        """What a prefill service would have written, by plain arithmetic."""
        for layer, ratio in enumerate(CONFIG.compress_ratios):
            rows = self.rows(length, 512)
            sequence.extend_window(layer, rows)
            for position in range(max(0, length - 128), length):
                place = torch.tensor([resources.window_slot * 256 + position % 256])
                KERNELS.pack_rows(rows[position : position + 1], self.device.window[layer], place, WINDOW_PAGE)
            for kind in (CacheKind.C4, CacheKind.INDEX) if ratio == 4 else (CacheKind.C128,) if ratio else ():
                raw = self.rows(length, WIDTHS[kind])
                sequence.extend_state(layer, kind, raw)
                first = max(0, length // 4 * 4 - 4) if ratio == 4 else length // 128 * 128
                state = self.device.states[layer, kind]
                for position in range(first, length):
                    state[resources.state_slot, position % state.shape[1]] = raw[position]
                entries = self.rows(length // ratio, 128 if kind is CacheKind.INDEX else 512)
                sequence.extend_entries(layer, kind, entries)
                self._place(layer, kind, resources, entries)
        sequence.advance(length)

    def _place(self, layer: int, kind: CacheKind, resources: RequestResources, entries: Tensor) -> None:
        if entries.shape[0] == 0:
            return
        ids = torch.arange(entries.shape[0])
        if kind is CacheKind.C4:
            places = torch.tensor(resources.host_pages)[ids // 64] * 64 + ids % 64
            KERNELS.pack_rows(entries, self.host.buffers[layer], places, C4_PAGE)
        elif kind is CacheKind.INDEX:
            places = torch.tensor(resources.logical_pages)[ids // 64] * 64 + ids % 64
            KERNELS.pack_index_keys(entries, self.device.index[layer], places)
        else:
            places = torch.tensor(resources.logical_pages)[ids // 2] * 2 + ids % 2
            KERNELS.pack_rows(entries, self.device.c128[layer], places, C128_PAGE)

    def step(self) -> None:
        """One decode step in both stores, comparing all that the model would read."""
        self.hisparse.prepare_step(self.resources, self.batch.positions.tolist())
        kv = PagedDecodeKV(self.tables, self.batch.positions, self.device, self.hisparse, KERNELS)
        count = len(self.local)
        for layer, ratio in enumerate(CONFIG.compress_ratios):
            rows = self.rows(count, 512)
            assert torch.equal(kv.extend_window(layer, rows), self.batch.extend_window(layer, rows))
            for kind in (CacheKind.C4, CacheKind.INDEX) if ratio == 4 else (CacheKind.C128,) if ratio else ():
                closing = ((self.batch.positions + 1) % kind.ratio == 0).nonzero().flatten()
                raw = self.rows(count, WIDTHS[kind])
                mine = kv.extend_state(layer, kind, raw, closing)
                assert torch.equal(mine, self.batch.extend_state(layer, kind, raw, closing))
                if len(closing):
                    entries = self.rows(len(closing), 128 if kind is CacheKind.INDEX else 512)
                    kv.append_entries(layer, kind, closing, entries)
                    self.batch.append_entries(layer, kind, closing, entries)
            if ratio == 4:
                for mine, theirs in zip(kv.index_keys(layer), self.batch.index_keys(layer), strict=True):
                    assert torch.equal(mine, theirs)
                selected = self._selected()
                assert torch.equal(kv.gather_c4(layer, selected), self.batch.gather_c4(layer, selected))
            if ratio == 128:
                for mine, theirs in zip(kv.c128_entries(layer), self.batch.c128_entries(layer), strict=True):
                    assert torch.equal(mine, theirs)
        kv.end_step()
        self.batch.advance()
        self.hisparse.check_integrity([r.hot_slot for r in self.resources], [int(p) // 4 for p in self.batch.positions])

    def _selected(self) -> Tensor:
        """Random entries, always with the newest ones among them."""
        found = torch.full((len(self.local), CONFIG.index_topk), -1)
        for row, position in enumerate(self.batch.positions.tolist()):
            count = (position + 1) // 4
            ids = torch.randperm(count, generator=self.generator)[: CONFIG.index_topk]
            recent = torch.arange(max(0, count - 3), count)
            ids = torch.cat([recent, ids]).unique()[-CONFIG.index_topk :] if count else ids
            found[row, : len(ids)] = ids
        return found


BORDERS = [4 * (D + extra) + rest for extra in (-1, 0, 1, 2) for rest in range(4)]


@pytest.mark.parametrize("length", [*BORDERS, 1, 3, 4, 5, 126, 127, 128, 129, 254, 255, 256, 257, 259, 300])
def test_every_border_with_the_smallest_hot_buffer(length: int):
    pair = Pair([length], 24, D, seed=length)
    for _ in range(22):
        pair.step()


@pytest.mark.parametrize("hot_entries", [D, D + 3, 64, 200])
def test_a_batch_of_unequal_lengths_over_page_borders(hot_entries: int):
    pair = Pair([3, 61, 125, 250, 511], 40, hot_entries, seed=hot_entries)
    for _ in range(36):
        pair.step()
    counters = pair.hisparse.counters
    assert counters.hits > 0
    assert (counters.misses > 0) == (hot_entries < 129)


@pytest.mark.parametrize("resident", [1, 3, 40])
@pytest.mark.parametrize("length", [*BORDERS[::3], 127, 255, 256, 259, 511])
def test_every_border_with_some_pages_resident(length: int, resident: int):
    pair = Pair([length], 24, D, seed=length, resident=resident)
    for _ in range(22):
        pair.step()
    counters = pair.hisparse.counters
    assert counters.spills == 0
    if resident == 40 and length // 4 > D:
        assert counters.resident > 0
        assert counters.hits == counters.misses == 0


@pytest.mark.parametrize("resident", [1, 7, 40])
def test_a_batch_shares_the_resident_pages(resident: int):
    pair = Pair([1020, 701, 490, 250, 33], 70, D, seed=resident, resident=resident)
    for _ in range(64):
        pair.step()
        check_resident_bytes(pair)
    counters = pair.hisparse.counters
    assert counters.resident > 0
    assert counters.misses > 0
    assert (counters.spills > 0) == (resident == 7)
    slots = [resources.hot_slot for resources in pair.resources[:4]]
    held = [len(pair.hisparse.resident.pages_of(slot)) for slot in slots]
    if resident < 12:
        assert sum(held) == resident
        assert max(held) - min(held) <= 1
    for slot in slots:
        pair.hisparse.release(slot)
    assert pair.hisparse.resident.allocator.free == resident
    pair.hisparse.check_integrity([], [])


def check_resident_bytes(pair: "Pair") -> None:
    """Of every resident row that the host has too: the same bytes in both."""
    for resources, position in zip(pair.resources, pair.batch.positions.tolist(), strict=True):
        for page, resident in pair.hisparse.resident.pages_of(resources.hot_slot).items():
            entries = torch.arange(page * 64, min((page + 1) * 64, position // 4 - 1))
            if not len(entries):
                continue
            for layer, host in pair.host.buffers.items():
                theirs = resources.host_pages[page] * 64 + entries % 64
                mine = pair.hisparse.resident_row(resident) + entries % 64
                hot = pair.hisparse.hot_state(layer).pages
                for view in (data_words, scale_bytes):
                    left, right = view(hot, C4_PAGE).flatten(0, 1)[mine], view(host, C4_PAGE).flatten(0, 1)[theirs]
                    assert torch.equal(left, right), (layer, page)


@pytest.mark.parametrize("length", [4 * D + rest for rest in range(12)])
def test_the_newest_entry_row_is_filled_on_admission(length: int):
    pair = Pair([length], 8, D, seed=1)
    slot = pair.resources[0].hot_slot
    for layer in CONFIG.layers_of(4):
        hot = pair.hisparse.hot_state(layer)
        assert int(hot.entries[slot, D]) == length // 4 - 1
        place = torch.tensor([slot * hot.rows_per_slot + D])
        expected = pair.local[0].entries[layer, CacheKind.C4].rows(length // 4 - 1, length // 4)
        assert torch.equal(KERNELS.unpack_rows(hot.pages, place, C4_PAGE), expected)


def test_admission_never_reads_host_rows_behind_the_prompt(monkeypatch: pytest.MonkeyPatch):
    pair = Pair([30], 8, 64, seed=2)
    seen: list[int] = []
    original = pair.host.load_rows

    def spy(layer: int, host_rows: Tensor, pages: Tensor, rows: Tensor) -> None:
        seen.extend(host_rows.tolist())
        original(layer, host_rows, pages, rows)

    monkeypatch.setattr(pair.host, "load_rows", spy)
    pair.hisparse.admit_request_direct(pair.resources[0], 30)
    first = pair.resources[0].host_pages[0] * 64
    assert set(seen) == set(range(first, first + 30 // 4))


def test_what_the_host_already_has_is_not_backed_up_again():
    pair = Pair([4 * D + 4], 12, D, seed=3)
    before = {layer: buffer.clone() for layer, buffer in pair.host.buffers.items()}
    for _ in range(4):
        pair.step()
    # The first birth displaces the prompt's newest entry, which came with the handover.
    assert pair.hisparse.counters.backups == 0
    assert all(torch.equal(pair.host.buffers[layer], buffer) for layer, buffer in before.items())
    for _ in range(4):
        pair.step()
    assert pair.hisparse.counters.backups == len(CONFIG.layers_of(4))


def test_backed_up_rows_are_the_born_rows_byte_for_byte():
    pair = Pair([4 * D + 2], 20, D, seed=4)
    for _ in range(14):
        pair.step()
    resources = pair.resources[0]
    for layer in CONFIG.layers_of(4):
        kept = pair.local[0].entries[layer, CacheKind.C4]
        for entry in range(kept.count - 1):
            place = torch.tensor([resources.host_pages[entry // 64] * 64 + entry % 64])
            assert torch.equal(
                KERNELS.unpack_rows(pair.host.buffers[layer], place, C4_PAGE), kept.rows(entry, entry + 1)
            )


def test_a_slot_that_goes_to_a_new_request_hits_nothing_of_the_old_one():
    pair = Pair([4 * D + 40], 8, D, seed=5)
    for _ in range(5):
        pair.step()
    slot = pair.resources[0].hot_slot
    pair.hisparse.release(slot)
    for layer in CONFIG.layers_of(4):
        assert (pair.hisparse.hot_state(layer).entries[slot] == -1).all()


def test_pages_of_the_layouts_are_the_ones_in_use():
    pair = Pair([300], 4, D, seed=6)
    assert pair.device.index[1].shape[1] == INDEX_PAGE.page_bytes
    assert quantise_rows(torch.zeros(1, 512))[0].shape[1] == C4_PAGE.data_bytes
