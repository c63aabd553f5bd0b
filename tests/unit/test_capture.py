"""The capture on our own tokenizer and templates: what extends, what forks, and where."""

import chats
from chats import PLAIN, THINKING, Player, call, reply, tool, user


def player(template: str = PLAIN) -> Player:
    return Player(chats.renderer(template))


def test_an_echoed_reply_extends_the_branch_with_recorded_ids() -> None:
    p, answer = player(), reply("It is  4.")
    p.ask([user("2+2?")], answer)
    placed = p.ask([user("2+2?"), answer.message(), user("And 3+3?")], reply("6"))
    assert placed.reason is None
    assert p.text(placed.delta_ids) == (
        "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert p.branches == 1
    p.check()


def test_a_template_that_drops_thoughts_forks_at_the_next_user_message() -> None:
    p, answer = player(THINKING), reply("4", "four")
    first = p.ask([user("2+2?")], answer)
    placed = p.ask([user("2+2?"), answer.message(), user("And now?")], reply("5", "five"))
    assert placed.reason == "template_rewrites_history"
    assert placed.keep == len(first.prompt_ids)
    assert "four" not in p.text(placed.prompt_ids)
    assert p.branches == 2
    p.check()


def test_it_keeps_thoughts_before_a_tool_result() -> None:
    p, answer = player(THINKING), reply(None, "hm", (call("c1"),))
    p.ask([user("weather?")], answer)
    placed = p.ask([user("weather?"), answer.message(), tool("c1", "rain")], reply("Rain."))
    assert placed.reason is None and "hm" in p.text(placed.prompt_ids)
    assert p.branches == 1
    p.check()
