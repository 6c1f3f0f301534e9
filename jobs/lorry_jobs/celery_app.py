"""The Celery app, made the same way by clients, workers and gateways. The only place with Celery's setting names."""

from __future__ import annotations

from typing import Any

from celery import Celery

from .settings import QueueSettings

QUEUE = "lorry"
"""Named by clients; the mailbox decides which worker's own queue an op really goes to."""


def create_app(settings: QueueSettings, *, client_name: str = "lorry-client") -> Celery:
    """An app that speaks JSON only and sends ops through the mailbox transport."""
    app = Celery("lorry", set_as_current=False)
    app.conf.update(celery_config(settings, client_name))
    return app


def celery_config(settings: QueueSettings, client_name: str) -> dict[str, Any]:
    url = settings.redis_url
    return {
        "broker_url": url,
        "broker_transport": "lorry_jobs.transport:Transport",
        "result_backend": url,
        "broker_transport_options": {
            # Deliveries may be lost or doubled, the mailbox repairs both: no unacked bookkeeping in Redis.
            "ack_emulation": False,
            # One list per queue. With several, a worker would scan four keys per queue.
            "priority_steps": [0],
            "socket_keepalive": True,
            "socket_timeout": 30,  # must exceed kombu's BRPOP timeout of 1 s
            "socket_connect_timeout": settings.connect_timeout_seconds,
            "health_check_interval": 10,
            "client_name": client_name,
            "max_connections": 32,
        },
        "broker_pool_limit": 32,
        "broker_connection_timeout": settings.connect_timeout_seconds,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_default_queue": QUEUE,
        "task_create_missing_queues": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_serializer": "json",
        "result_accept_content": ["json"],
        "event_serializer": "json",
        # The commit writes the result, fenced; a worker thread must not write one beside it.
        "task_ignore_result": True,
        "task_acks_late": False,
        "task_track_started": False,
        "task_send_sent_event": False,
        "task_publish_retry": False,  # the SDK retries, and knows what for
        "result_expires": settings.result_ttl_seconds,
        "result_backend_thread_safe": True,
        "redis_socket_keepalive": True,
        "redis_socket_timeout": 30,
        "redis_socket_connect_timeout": settings.connect_timeout_seconds,
        "redis_backend_health_check_interval": 10,
        "redis_retry_on_timeout": True,
        "worker_pool": "threads",
        "worker_prefetch_multiplier": 0,
        "worker_send_task_events": True,
        "worker_disable_rate_limits": True,
        "worker_hijack_root_logger": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
    }
