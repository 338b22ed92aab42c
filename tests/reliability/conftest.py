"""A log that is not kept: each damaged file is told of in it."""

import logging

import pytest


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    # pytest keeps every record, and a record its error, and an error the bytes of the frames it went through.
    caplog.set_level(logging.CRITICAL, logger="dejakv.store")
