"""Answers of a given form from the embedded model: a record, a choice, a pattern.

python examples/structured.py
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

import jpaged
from jpaged.demo import MODEL_PATH


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    languages: list[Annotated[str, Field(max_length=12)]] = Field(max_length=2)


def main() -> None:
    llm = jpaged.LLM(str(MODEL_PATH), max_model_len=256, num_blocks=64)
    forms = [
        {"json_schema": Person, "disable_any_whitespace": True},
        {"choice": ["yes", "no", "maybe"]},
        {"regex": r"def [a-z]{3,8}\((self|cls)\):"},
        {"grammar": 'start: sum\nsum: /[0-9]/ (("+" | "*") /[0-9]/)*'},
    ]
    asked = [jpaged.SamplingParams(max_tokens=120, seed=1, structured=form) for form in forms]
    for form, out in zip(
        forms, llm.generate(["x = "] * len(forms), asked, use_tqdm=False), strict=True
    ):
        answer = out.outputs[0]
        print(f"{next(iter(form)):12} {answer.finish_reason:6} {answer.text!r}")


if __name__ == "__main__":
    main()
