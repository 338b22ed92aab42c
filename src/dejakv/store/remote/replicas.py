"""A thread that follows what other machines put into and take out of shared objects."""

import random
import threading
import time
from collections.abc import Callable, Sequence

from dejakv.store.counters import logger
from dejakv.store.reconcile import News
from dejakv.store.remote.feed import USED, ChangeFeed, FeedUnreachable

LIST_SECONDS = 10.0
"""Mean seconds between two listings, drawn at random, so that machines do not list at once.

Services charge for listings. So the mean is at least `SHARE` times as long as a listing takes.
"""
SHARE = 20
"""How many times longer than a listing the pause after it is on average, at least."""
FEED_SECONDS = 300.0
"""Least seconds from a listing to the next while a feed is quiet, for writers without the feed."""
_AWAY_SECONDS = 0.5


class ReplicaFollower:
    """A thread that calls `catch_up` again and again until it is closed.

    It is a thread apart, so that no request waits for a listing.

    Parameters
    ----------
    catch_up : Callable[[News | None], object]
        Called with what a feed told; None: by a listing.
    share : Callable[[Sequence[str]], Sequence[str]]
        Called with ids of entries that others used. Returns those used here since the last call,
        for the feed.
    feed : ChangeFeed | None
        The feed; None: listings alone.
    """

    def __init__(
        self,
        catch_up: Callable[[News | None], object],
        share: Callable[[Sequence[str]], Sequence[str]],
        feed: ChangeFeed | None = None,
    ) -> None:
        self._catch_up, self._share, self._feed = catch_up, share, feed
        self._listing_seconds = 0.0
        self._last_listing = time.monotonic()
        self._next_listing = self._last_listing + LIST_SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dejakv-replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            # Nobody waits for this comparison, and the next one may succeed.
            except Exception:
                logger.exception("a store was not compared with its objects")
                # A pause: an error that stays must not fill a core and the log.
                self._closed.wait(_AWAY_SECONDS)

    def _follow(self) -> None:
        news: News | None = None
        if self._feed is None:
            self._closed.wait(max(0.0, self._next_listing - time.monotonic()))
        else:
            try:
                feed_news = self._feed.receive()
                news = feed_news[:2] if feed_news is not None else None
                self._feed.publish(USED, self._share(feed_news[2] if feed_news is not None else ()))
                # Quiet feed: a listing is due only now and then, for writers without the feed.
                if news is not None and not any(news):
                    if time.monotonic() < max(
                        self._last_listing + FEED_SECONDS, self._next_listing
                    ):
                        return
                    news = None

                # All machines miss what their feed has lost: they must not list at once.
                if feed_news is None:
                    self._closed.wait(
                        random.uniform(0.0, min(LIST_SECONDS, SHARE * self._listing_seconds))
                    )
            except FeedUnreachable:
                # Without its feed, a machine lists as often as one that has none.
                self._closed.wait(_AWAY_SECONDS)
                if time.monotonic() < self._next_listing:
                    return

        if self._closed.is_set():
            return

        began = time.monotonic()
        self._catch_up(news)

        if news is None:
            now = time.monotonic()
            self._last_listing, self._listing_seconds = now, now - began
            self._next_listing = now + max(
                LIST_SECONDS, SHARE * self._listing_seconds
            ) * random.uniform(0.8, 1.2)
