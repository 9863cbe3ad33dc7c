"""The control plane as an ASGI application."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from api import agent_channel, errors
from api.control import Control
from api.routes import access, health, jobs, nodes
from api.security import BodyLimit, Head, SecurityHeaders
from api.settings import Settings

PREFIX = "/api/v1"


def create_app(settings: Settings) -> FastAPI:
    """The application; its database must be migrated before it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Made here, not before: the parts belong to the running event loop.
        control = Control(settings)
        app.state.control = control
        try:
            await control.start()
            yield
        finally:
            await control.stop()

    app = FastAPI(
        title="Unisono",
        version=importlib.metadata.version("unisono"),
        description="The control plane of a training cluster: nodes, jobs, logs, step timings.",
        lifespan=lifespan,
        openapi_url=f"{PREFIX}/openapi.json",
        # The stock documentation pages load from a CDN, which a closed network does not reach.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.settings = settings
    errors.install(app)
    # The form for a new job may carry a bundle; its page bounds it as such.
    exempt = frozenset({f"{PREFIX}/bundles", "/jobs/new"})
    app.add_middleware(BodyLimit, limit=settings.body_limit, exempt=exempt)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Head)
    for router in (jobs.router, nodes.router, access.router, health.cluster_router):
        app.include_router(router, prefix=PREFIX)
    app.include_router(health.router)
    app.include_router(health.router, prefix=PREFIX, include_in_schema=False)
    app.include_router(agent_channel.router)
    return app
