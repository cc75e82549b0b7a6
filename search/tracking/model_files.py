"""A bundle as the files of an MLflow model: code, the bundle itself, signature, input example, requirements."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from search.bundles.bundle import Bundle
from trials.data.encoding.encoding import Encoding
from trials.data.encoding.vocabulary import Vocabulary

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models import ModelSignature

CODE = Path(__file__).with_name("served_model.py")
ARTIFACT = "bundle"
"""Name of the model's artifact that is the bundle's folder."""
REQUIREMENTS = ("dhen-search", "mlflow", "torch", "numpy", "pandas", "pyarrow", "safetensors")
"""Distributions that the process which serves must have, in the versions that are installed here."""


def write_model(bundle: Bundle, folder: Path) -> None:
    """Writes the files of an MLflow model of a bundle, which is copied without checkpoints of online training."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=folder.parent) as copies:
        copy = Path(copies) / bundle.directory.resolve().name
        shutil.copytree(bundle.directory, copy, ignore=shutil.ignore_patterns(".*"))
        # its advice on type hints is for models whose signature is not given
        warnings.simplefilter("ignore")
        import mlflow.pyfunc

        mlflow.pyfunc.save_model(
            str(folder),
            python_model=str(CODE),
            artifacts={ARTIFACT: str(copy)},
            signature=_signature(bundle.encoding),
            input_example=_example(bundle.encoding),
            pip_requirements=requirements(),
        )


def requirements() -> list[str]:
    """Returns what serving needs, pinned; without what a version says of its build, such as `+cpu`."""
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in REQUIREMENTS]


def _signature(encoding: Encoding) -> ModelSignature:
    """Returns the columns that rows must have: numbers as such, any value elsewhere, since an id may be a number
    or text, and a multi-hot value a list or text. All of them may be null."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, Schema, TensorSpec

    schema, any_value = encoding.schema, AnyType()  # type: ignore[no-untyped-call]
    columns: list[ColSpec | TensorSpec] = [
        ColSpec("double" if name in schema.numeric else any_value, name) for name in schema.inputs
    ]
    return ModelSignature(inputs=Schema(columns), outputs=Schema([ColSpec("double")]))


def _example(encoding: Encoding) -> pd.DataFrame:
    """Returns two rows: usual values of the training rows, and one without any value."""
    import pandas as pd

    # as objects, a missing number is null in the example's JSON too
    columns = {
        name: pd.Series([_usual_value(encoding, name), None], dtype=object) for name in encoding.schema.inputs
    }
    return pd.DataFrame(columns)


def _usual_value(encoding: Encoding, name: str) -> Any:
    """Returns the mean of a numeric column, the most frequent value of another; None where none is kept."""
    schema = encoding.schema
    if name in schema.numeric:
        at_mean = np.zeros((1, len(encoding.features.numeric)), dtype=np.float32)
        return float(encoding.numbers(name, at_mean)[0])
    vocabulary = encoding.vocabularies.get(name)
    if not isinstance(vocabulary, Vocabulary) or not len(vocabulary):
        return None
    value = vocabulary.values[0].as_py()
    column = schema.multi_hot.get(name)
    return value if column is None or column.separator is not None else [value]
