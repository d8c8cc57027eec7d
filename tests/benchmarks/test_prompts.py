import json

from benchmarks.prompts import SUBJECTS, main, prompts


def test_no_prompt_is_made_twice_and_the_same_seed_makes_the_same():
    train, held_out = prompts(seed=3)
    assert len({*train, *held_out}) == len(train) + len(held_out)
    assert prompts(seed=3) == (train, held_out)
    assert prompts(seed=4) != (train, held_out)


def test_a_held_out_subject_has_all_its_prompts_held_out():
    train, held_out = prompts()
    asked = {f"What is {subject}?" for subject in SUBJECTS["virtue"]}
    kept_back = asked & set(held_out)
    assert kept_back
    for question in kept_back:
        subject = question.removeprefix("What is ").removesuffix("?")
        assert f"Write a haiku about {subject}." in held_out
        assert f"Write a haiku about {subject}." not in train


def test_rows_are_chats_with_one_question(tmp_path):
    main(["--train", str(tmp_path / "a" / "train.jsonl"), "--held-out", str(tmp_path / "held-out.jsonl")])
    lines = (tmp_path / "a" / "train.jsonl").read_text().splitlines()
    (turn,) = json.loads(lines[0])["messages"]
    assert turn["role"] == "user"
    assert turn["content"]


def test_prompts_of_two_subjects_are_as_many_as_asked_and_keep_to_their_side():
    without, _ = prompts(pairs=0)
    train, held_out = prompts(pairs=500)
    assert len(train) == len(without) + 500
    assert len(set(train)) == len(train)
    assert not set(train) & set(held_out)
    kept_back = {virtue for virtue in SUBJECTS["virtue"] if f"What is {virtue}?" in held_out}
    assert kept_back
    assert not [prompt for prompt in train for virtue in kept_back if f" {virtue} and " in prompt]
