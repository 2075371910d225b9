"""Refusals of a batch's rows, with the file and the tensor that they are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opdtool.core.errors import InputError

if TYPE_CHECKING:
    from opdtool.io.batch import Batch


@contextmanager
def naming_batch(batch: Batch) -> Iterator[None]:
    """Add to a refusal of a batch's rows or weights which file and tensor it speaks of."""
    from opdtool.checks.masks import NotFiniteError
    from opdtool.core.plan import RowsError

    try:
        yield
    except RowsError as error:
        first, *more = batch.paths
        where = f"{first} and {len(more)} more" if more else f"{first}"
        tensor = "input_ids" if batch.lengths_from == "width" else batch.lengths_from
        raise InputError(f"{where}: {tensor}: {error}") from error
    except NotFiniteError as error:
        path, row = batch.file_of(error.row)
        raise InputError(f"{path}: {NotFiniteError(error.tensor, row)}") from error
