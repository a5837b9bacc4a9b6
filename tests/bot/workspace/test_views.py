"""Modals and home tabs: through Slack's SDK and Bolt, with triggers, stacks, submissions and Slack's refusals."""

import asyncio
from typing import Any

import pytest
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import IncompleteError, NotThereError, View, Workspace
from tests.bot.workspace.bolt import app_in, running
from tests.bot.workspace.test_web_api import refusal

Json = dict[str, Any]


def plain(text: str) -> Json:
    return {"type": "plain_text", "text": text}


def modal(*blocks: Json, title: str = "Ask", **more: Any) -> Json:
    blocks = blocks or ({"type": "divider"},)
    return {"type": "modal", "title": plain(title), "blocks": list(blocks), **more}


def question(name: str = "why", **element: Any) -> Json:
    entry = {"type": "plain_text_input", "action_id": f"{name}_text", **element}
    return {"type": "input", "block_id": name, "label": plain("Why?"), "element": entry}


FORM = modal(question(), submit=plain("Send"), callback_id="form", private_metadata="job-1")


async def opened(ws: Workspace, slack: AsyncWebClient, body: Json = FORM, who: str = "ada") -> View:
    await slack.views_open(trigger_id=ws.trigger(who), view=body)
    view = ws.person(who).view
    assert view is not None
    return view


async def test_a_trigger_opens_once_and_within_three_seconds(ws: Workspace, slack: AsyncWebClient) -> None:
    first, late = ws.trigger("ada"), ws.trigger("ada")
    answer = await slack.views_open(trigger_id=first, view=FORM)
    assert (answer["view"]["callback_id"], answer["view"]["private_metadata"]) == ("form", "job-1")
    assert answer["view"]["root_view_id"] == answer["view"]["id"]
    assert (await refusal(slack.views_open(trigger_id=first, view=FORM)))["error"] == "exchanged_trigger_id"
    ws.clock.advance(3)
    assert (await refusal(slack.views_open(trigger_id=late, view=FORM)))["error"] == "expired_trigger_id"
    assert (await refusal(slack.views_open(trigger_id="1.2.x", view=FORM)))["error"] == "invalid_trigger_id"


async def test_a_modal_holds_three_views(ws: Workspace, slack: AsyncWebClient) -> None:
    root = await opened(ws, slack)
    for title in ("Two", "Three"):
        await slack.views_push(trigger_id=ws.trigger("ada", in_view=True), view=modal(title=title))
    assert [view.body["title"]["text"] for view in ws.person("ada").views] == ["Ask", "Two", "Three"]
    top = ws.person("ada").views[-1]
    assert (top.root, top.previous) == (root.id, ws.person("ada").views[1].id)
    late = await refusal(slack.views_push(trigger_id=ws.trigger("ada", in_view=True), view=modal()))
    assert late["error"] == "push_limit_reached"
    outside = await refusal(slack.views_push(trigger_id=ws.trigger("ada"), view=modal()))
    assert outside["error"] == "not_found"


async def test_an_update_needs_the_hash_it_saw(ws: Workspace, slack: AsyncWebClient) -> None:
    view = await opened(ws, slack)
    answer = await slack.views_update(view_id=view.id, hash=view.hash, view=modal(title="Newer"))
    assert answer["view"]["title"]["text"] == "Newer"
    data = await refusal(slack.views_update(view_id=view.id, hash=view.hash, view=modal(title="Newest")))
    assert data["error"] == "hash_conflict"
    data = await refusal(slack.views_update(view_id="V404", view=modal()))
    assert data["error"] == "not_found"


async def test_an_update_keeps_what_was_entered_where_the_input_is_still_there(
    ws: Workspace, slack: AsyncWebClient
) -> None:
    ada = ws.person("ada")
    view = await opened(ws, slack)
    await ada.submit(view, {"why": "too slow"})  # nobody acknowledges it: the form stays, filled in
    same = await slack.views_update(view_id=view.id, view=modal(question(), submit=plain("Send")))
    entered = {"why": {"why_text": {"type": "plain_text_input", "value": "too slow"}}}
    assert same["view"]["state"]["values"] == entered
    other = await slack.views_update(view_id=view.id, view=modal(question("who"), submit=plain("Send")))
    assert other["view"]["state"]["values"] == {}


async def test_an_external_id_names_one_view(ws: Workspace, slack: AsyncWebClient) -> None:
    await opened(ws, slack, modal(external_id="job-1"))
    answer = await slack.views_update(external_id="job-1", view=modal(title="Found", external_id="job-1"))
    assert answer["view"]["title"]["text"] == "Found"
    taken = modal(external_id="job-1")
    data = await refusal(slack.views_open(trigger_id=ws.trigger("grace"), view=taken))
    assert data["error"] == "duplicate_external_id"


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (modal(title="x" * 25), "must be less than 25 characters [json-pointer:/view/title/text]"),
        (modal(submit=plain("x" * 25)), "must be less than 25 characters [json-pointer:/view/submit/text]"),
        (
            modal(private_metadata="x" * 3001),
            "must be less than 3001 characters [json-pointer:/view/private_metadata]",
        ),
        (modal(callback_id="x" * 256), "must be less than 256 characters [json-pointer:/view/callback_id]"),
        (
            modal(*[{"type": "divider"}] * 101),
            "no more than 100 items allowed [json-pointer:/view/blocks]",
        ),
        (modal(question()), "must define `submit` to use `input` block [json-pointer:/view/blocks/0/input]"),
        (modal(submit_disabled=True), "invalid additional property: submit_disabled [json-pointer:/view]"),
        (
            modal(question(max_length=3001), submit=plain("Go")),
            "must be less than 3001 [json-pointer:/view/blocks/0/element/max_length]",
        ),
        ({"type": "modal", "title": plain("x")}, "missing required field: blocks [json-pointer:/view]"),
        ({"type": "home", "blocks": []}, "unsupported type: home [json-pointer:/view/type]"),
    ],
)
async def test_a_view_that_breaks_a_limit_is_pointed_at(
    ws: Workspace, slack: AsyncWebClient, view: Json, message: str
) -> None:
    trigger = ws.trigger("ada")
    data = await refusal(slack.views_open(trigger_id=trigger, view=view))
    assert data["error"] == "invalid_arguments"
    assert data["response_metadata"]["messages"] == [
        "[ERROR] failed to match all allowed schemas [json-pointer:/view]",
        f"[ERROR] {message}",
    ]
    assert ws.person("ada").view is None


async def test_a_hundred_blocks_fit_and_250_kilobytes_do_not(ws: Workspace, slack: AsyncWebClient) -> None:
    await opened(ws, slack, modal(*[{"type": "divider"}] * 100))
    section = {"type": "section", "text": {"type": "mrkdwn", "text": "x" * 2600}}
    data = await refusal(slack.views_open(trigger_id=ws.trigger("ada"), view=modal(*[section] * 100)))
    assert data["error"] == "view_too_large"


async def test_a_form_is_asked_filled_refused_and_sent(ws: Workspace) -> None:
    app = app_in(ws)
    sent: list[Json] = []

    @app.command("/sysom")
    async def ask(ack: Any, body: Json, client: AsyncWebClient) -> None:
        await ack()
        await client.views_open(trigger_id=body["trigger_id"], view=FORM)

    @app.view("form")
    async def submitted(ack: Any, view: Json) -> None:
        sent.append(view)
        said = view["state"]["values"]["why"]["why_text"]["value"]
        if said == "because":
            await ack(response_action="errors", errors={"why": "that is no reason"})
        elif said == "more":
            await ack(response_action="push", view=modal(title="More"))
        else:
            await ack()

    ada = ws.person("ada")
    async with running(ws, app):
        await ada.command("/sysom mute")
        view = await ws.wait_for(lambda: ada.view)
        with pytest.raises(IncompleteError, match="complete this required field"):
            await ada.submit(view)
        with pytest.raises(NotThereError, match=r"no input 'who'; it has \['why'\]"):
            await ada.submit(view, {"who": "me"})
        assert sent == []
        await ada.submit(view, {"why": "because"})
        assert ada.view is not None
        assert ada.view.errors == {"why": "that is no reason"}
        await ada.submit(view, {"why_text": "more"})
        assert [view.body["title"]["text"] for view in ada.views] == ["Ask", "More"]
        await ada.close(ada.views[1])
        await ada.submit(view, {"why": "the disk is slow"})
        assert ada.view is None
    assert sent[-1]["state"]["values"] == {
        "why": {"why_text": {"type": "plain_text_input", "value": "the disk is slow"}}
    }
    assert sent[-1]["private_metadata"] == "job-1"


@pytest.mark.parametrize(
    ("answer", "titles"),
    [
        ({}, ["Ask"]),
        ({"response_action": "clear"}, []),
        ({"response_action": "update", "view": modal(title="Done")}, ["Ask", "Done"]),
    ],
)
async def test_what_an_answer_does_to_the_stack(ws: Workspace, answer: Json, titles: list[str]) -> None:
    app = app_in(ws)

    @app.view("two")
    async def submitted(ack: Any) -> None:
        await ack(**answer)

    ada = ws.person("ada")
    async with running(ws, app):
        await opened(ws, app.client)
        second = modal(title="Two", callback_id="two", submit=plain("Go"))
        await app.client.views_push(trigger_id=ws.trigger("ada", in_view=True), view=second)
        await ada.submit(ada.views[-1])
    assert [view.body["title"]["text"] for view in ada.views] == titles


@pytest.mark.parametrize(
    "answer",
    [
        {"response_action": "update", "view": {"type": "modal"}},
        {"response_action": "errors", "errors": {"nowhere": "x"}},
        {"response_action": "explode"},
    ],
)
async def test_an_answer_that_slack_cannot_use_is_trouble_for_the_person(ws: Workspace, answer: Json) -> None:
    app = app_in(ws)

    @app.view("form")
    async def submitted(ack: Any) -> None:
        await ack(**answer)

    async with running(ws, app):
        view = await opened(ws, app.client)
        await ws.person("ada").submit(view, {"why": "x"})
    shown = ws.person("ada").view
    assert shown is not None
    assert shown.errors == {"": "We had some trouble connecting. Try again?"}


async def test_a_submission_without_an_answer_in_3_s_is_trouble_and_not_sent_again(ws: Workspace) -> None:
    app = app_in(ws)
    times = 0
    reached, never = asyncio.Event(), asyncio.Event()

    @app.view("form")
    async def submitted(ack: Any) -> None:
        nonlocal times
        times += 1
        reached.set()
        await never.wait()

    ada = ws.person("ada")
    async with running(ws, app):
        view = await opened(ws, app.client)
        submission = asyncio.create_task(ada.submit(view, {"why": "x"}))
        await reached.wait()
        ws.clock.advance(3)
        assert (await submission).error == "operation_timeout"
        ws.clock.advance(3600)
        never.set()
    assert times == 1
    assert ada.view is not None
    assert ada.view.errors == {"": "We had some trouble connecting. Try again?"}
    assert ada.view.values["why"]["why_text"]["value"] == "x"


async def test_a_closed_view_is_told_where_it_was_asked_for(ws: Workspace) -> None:
    app = app_in(ws)
    closed: list[Json] = []

    @app.view_closed("quiet")
    async def quiet(ack: Any, body: Json) -> None:
        await ack()
        closed.append(body)

    @app.view_closed("told")
    async def told(ack: Any, body: Json) -> None:
        await ack()
        closed.append(body)

    ada = ws.person("ada")
    async with running(ws, app):
        await ada.close(await opened(ws, app.client, modal(callback_id="quiet")))
        both = {"callback_id": "told", "notify_on_close": True}
        await ada.close(await opened(ws, app.client, modal(**both)))
        await ada.close(await opened(ws, app.client, modal(clear_on_close=True, **both)))
    assert [(body["view"]["callback_id"], body["is_cleared"]) for body in closed] == [
        ("told", False),
        ("told", True),
    ]
    with pytest.raises(NotThereError, match="was closed or covered"):
        await ada.close(View(id="V1", user=ada.id, body={}, hash="", root="V1"))


async def test_an_action_in_a_view_carries_the_view_and_what_was_chosen(ws: Workspace) -> None:
    app = app_in(ws)
    bodies: list[Json] = []

    @app.action("rank")
    async def chosen(ack: Any, body: Json, client: AsyncWebClient) -> None:
        await ack()
        bodies.append(body)
        view = modal(
            body["view"]["blocks"][0], title=f"Rank {body['actions'][0]['selected_option']['value']}"
        )
        await client.views_update(view_id=body["view"]["id"], hash=body["view"]["hash"], view=view)

    options = [{"text": plain(f"rank {n}"), "value": str(n)} for n in range(3)]
    menu = {"type": "static_select", "action_id": "rank", "options": options}
    ada = ws.person("ada")
    async with running(ws, app):
        view = await opened(
            ws, app.client, modal({"type": "actions", "block_id": "ranks", "elements": [menu]})
        )
        assert (await ada.click(view, "rank", "2")).acknowledged
        await ws.wait_for(lambda: ada.view and ada.view.body["title"]["text"] == "Rank 2")
    assert bodies[0]["container"] == {"type": "view", "view_id": view.id}
    assert bodies[0]["view"]["state"]["values"]["ranks"]["rank"]["selected_option"]["value"] == "2"
    assert "response_url" not in bodies[0]


async def test_a_home_tab_is_published_and_opened(slack: AsyncWebClient) -> None:
    async with Workspace(events=frozenset({"app_home_opened"})) as ws:
        app = app_in(ws)
        views: list[Any] = []

        @app.event("app_home_opened")
        async def opened(event: Json, client: AsyncWebClient) -> None:
            views.append(event.get("view"))
            home = {"type": "home", "blocks": [{"type": "header", "text": plain(f"Visit {len(views)}")}]}
            await client.views_publish(user_id=event["user"], view=home)

        ada = ws.person("ada")
        async with running(ws, app):
            ada.visit_home()
            await ws.wait_for(lambda: ada.home)
            ada.visit_home()
            await ws.wait_for(lambda: ada.home and ada.home.body["blocks"][0]["text"]["text"] == "Visit 2")
        assert views[0] is None
        assert views[1]["blocks"][0]["text"]["text"] == "Visit 1"
