"""The methods of the Web API for views: `views.*`."""

from bot.workspace.refusals import refuse_arguments
from bot.workspace.web_api import Call, Method
from bot.workspace.world import Json


def open_view(call: Call) -> Json:
    return {"view": call.views.json(call.views.open(call.required("trigger_id"), call.arguments.get("view")))}


def push_view(call: Call) -> Json:
    return {"view": call.views.json(call.views.push(call.required("trigger_id"), call.arguments.get("view")))}


def update_view(call: Call) -> Json:
    view_id, external_id = call.text("view_id"), call.text("external_id")
    if not view_id and not external_id:
        raise refuse_arguments("missing required field: view_id")
    view = call.views.update(view_id, external_id, call.arguments.get("view"), call.text("hash"))
    return {"view": call.views.json(view)}


def publish_view(call: Call) -> Json:
    user = call.world.users.get(call.required("user_id"))
    if user is None or user.is_bot:
        raise refuse_arguments("invalid `user_id`")
    return {"view": call.views.json(call.views.publish(user, call.arguments.get("view"), call.text("hash")))}


METHODS: dict[str, Method] = {
    "views.open": open_view,
    "views.push": push_view,
    "views.update": update_view,
    "views.publish": publish_view,
}
