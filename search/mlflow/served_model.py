"""The model of a bundle as MLflow serves it, as *models from code*: MLflow keeps a copy of this file beside the
bundle and runs it where the model is loaded. Nothing is unpickled.

The process that loads the model needs dhen-search, which scores: raw rows are encoded as in training.
"""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from numpy.typing import NDArray

from dhen.errors import UserError
from search.bundles.bundle import read_bundle
from search.bundles.scorer import Scorer
from search.mlflow.model import ARTIFACT


class ServedModel(PythonModel):
    """A bundle that scores raw rows."""

    def load_context(self, context: PythonModelContext) -> None:
        """Reads the bundle, whose files are checked by their hashes."""
        self._scorer = Scorer(read_bundle(Path(context.artifacts[ARTIFACT])))

    def predict(  # type: ignore[override]  # without `params`, of which it has none
        self, context: PythonModelContext, model_input: pd.DataFrame
    ) -> NDArray[np.float64]:
        """Returns the probability of a click of each row.

        Raises:
            MlflowException: for rows that the log's roles do not allow; a server answers it as status 400.
        """
        try:
            return self._scorer.score(model_input)
        except UserError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error


mlflow.models.set_model(ServedModel())
