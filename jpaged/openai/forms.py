"""Fields of a body that ask for an answer of a certain form: OpenAI's response_format, vLLM's
structured_outputs and its older guided_* fields. All of them are translated to
SamplingParams.structured.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from jpaged.openai.fields import short

Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], FailFast(), Field(min_length=1)]
Schema = dict[str, Any] | str


class Strict(BaseModel):
    """A model that takes known fields of the right types only, since everything in a form changes
    the answer. In every field, null means "not given".
    """

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if not isinstance(data, dict):
            return data
        unknown = sorted(str(name) for name in data.keys() - known if data[name] is not None)
        if unknown:
            raise ValueError(f"{short(unknown[0])} is not supported")
        return data


class JsonSchema(Strict):
    """A named schema. Answers follow it whatever `strict` says."""

    name: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's response_format: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("type json_schema needs json_schema, and no other type takes it")
        return self

    @property
    def structured(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return {"json_object": True}
        return {"json_schema": self.json_schema.schema_}


class StructuredOutputs(Strict):
    """vLLM's structured_outputs, without the options that cannot be honoured."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False  # jpaged has no fallback

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(self._forms) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar, json_object")
        return self

    @property
    def _forms(self) -> dict[str, Any]:
        forms = {
            "json_schema": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
        }
        return {kind: value for kind, value in forms.items() if value is not None}

    @property
    def structured(self) -> dict[str, Any]:
        compact = {"disable_any_whitespace": True} if self.disable_any_whitespace else {}
        return self._forms | compact


class FormFields(BaseModel):
    """The fields that ask for a form; a body may set one of them."""

    structured: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        names = [*self.forms, *(["structured"] if self.structured else [])]
        if len(names) > 1:
            told = {"param": names[0], "message": f"{' and '.join(names)} exclude each other"}
            raise PydanticCustomError("invalid_value", "{message}", told)
        return self

    @property
    def forms(self) -> dict[str, dict[str, Any]]:
        """Return what each field that asks for a form is translated to, by the field's name."""
        guided = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        forms = {name: {kind: value} for name, (kind, value) in guided.items() if value is not None}
        for name in ("response_format", "structured_outputs"):
            field = getattr(self, name)
            if field is not None and field.structured is not None:
                forms[name] = field.structured
        return forms
