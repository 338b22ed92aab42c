"""Follows what other machines put into and take out of shared objects."""

import random
import threading
import time
from collections.abc import Callable, Sequence

from dejakv.store.counters import logger
from dejakv.store.reconcile import News
from dejakv.store.remote.feed import USED, ChangeFeed, FeedUnreachable

LIST_SECONDS = 10.0
"""Mean seconds between two listings; 20 times as long as a listing takes where that is more, since services charge for them. They are drawn
at random, so that machines do not list at once."""
SHARE = 20
FEED_SECONDS = 300.0
"""Least seconds between listings with a feed, for changes by writers without it."""
_AWAY_SECONDS = 0.5


class ReplicaFollower:
    """Calls `catch_up` again and again in a thread of its own, so that nothing waits for a listing, until it is closed.

    catch_up  with what a feed told; without: by a listing
    share     with ids of what others used; returns those that were used here since the last call, for the feed
    """

    def __init__(
        self,
        catch_up: Callable[[News | None], object],
        share: Callable[[Sequence[str]], Sequence[str]],
        feed: ChangeFeed | None = None,
    ) -> None:
        self._catch_up, self._share, self._feed = catch_up, share, feed
        self._took = 0.0
        self._heard = time.monotonic()
        self._next = self._heard + LIST_SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dejakv-replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except Exception:  # nobody waits for it, and the next may succeed
                logger.exception("a store was not compared with its objects")
                # A pause: an error that stays must not fill a core and the log.
                self._closed.wait(_AWAY_SECONDS)

    def _follow(self) -> None:
        news: News | None = None
        if self._feed is None:
            self._closed.wait(max(0.0, self._next - time.monotonic()))
        else:
            try:
                feed_news = self._feed.hear()
                news = feed_news[:2] if feed_news is not None else None
                self._feed.tell(USED, self._share(feed_news[2] if feed_news is not None else ()))
                # Quiet feed: a listing is due only now and then, for writers without the feed.
                if news is not None and not any(news):
                    if time.monotonic() < max(self._heard + FEED_SECONDS, self._next):
                        return
                    news = None
                if feed_news is None:  # all machines miss what their feed has lost
                    self._closed.wait(random.uniform(0.0, min(LIST_SECONDS, SHARE * self._took)))
            except FeedUnreachable:
                self._closed.wait(_AWAY_SECONDS)
                if time.monotonic() < self._next:
                    return

        if self._closed.is_set():
            return

        began = time.monotonic()
        self._catch_up(news)

        if news is None:
            now = time.monotonic()
            self._heard, self._took = now, now - began
            self._next = now + max(LIST_SECONDS, SHARE * self._took) * random.uniform(0.8, 1.2)
