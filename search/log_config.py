"""LogConfig: the log of a study, and how it is read. Free of torch, so that `prepare` starts at once."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from trials.data.demo.spec import DemoLog
from trials.data.read_options import ReadOptions

DEMO = "demo"
"""The name of the built-in generated log, where a path of a log would stand."""


class DemoConfig(DemoLog):
    """The built-in demo log."""

    rows: int = Field(default=200_000, ge=1000)
    """Number of examples to generate, in time order over ten days."""


class LogConfig(ReadOptions):
    """The log of a study or a table, and how it is read."""

    data: tuple[str, ...] = (DEMO,)
    """Files or folders of the log, a prepared log, URLs of such, or `demo` for the built-in one; on the command
    line `--data`."""
    schema_file: str | None = None
    """Path of a schema.yaml that `prepare` wrote and you edited; the schema is inferred where not given."""
    demo: DemoConfig = DemoConfig()
    """The built-in log, where `data` is `demo`."""

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several_logs(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _of_the_built_in_log(self) -> LogConfig:
        if self.demo != DemoConfig() and self.data != (DEMO,):
            raise ValueError(
                f"demo.KEY are of the built-in log, and data={','.join(self.data)} is another: leave one of the "
                "two out"
            )
        return self
