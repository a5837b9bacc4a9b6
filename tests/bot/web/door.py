"""The server's application without a network, for tests."""

import httpx

from bot.web.app import create_app
from bot.web.metrics import Metrics
from diagnosis.ingest import Ingest
from diagnosis.store import StoreError

TOKENS = {"node-a": "token-a", "node-b": "token-b"}


class Door:
    """One server's application, without a network."""

    def __init__(self, store, **options):
        self.metrics = Metrics(now=lambda: 1_700_000_000.0)
        self.app = create_app(Ingest(store, TOKENS), metrics=self.metrics, **options)

    def client(self, token="token-a", address="192.0.2.1"):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(address, 1))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)

    async def post(self, wire, **who):
        async with self.client(**who) as http:
            return await http.post("/api/v1/batches", content=wire)

    async def get(self, path):
        async with self.client(token=None) as http:
            return await http.get(path)

    @property
    def counts(self):
        return self.metrics.counts.read()


class BrokenStore:
    def add(self, batch, received_ns):
        raise StoreError("the disk under the store is full: free some space")
