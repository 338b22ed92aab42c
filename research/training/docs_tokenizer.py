"""The tokenizer of docs-lm: every word of the documents is one token.

Any other ASCII text falls back to characters.
"""

import json
import re
import string
from pathlib import Path

from dejakv_models.docs import ANSWER, BOS, EOS, QUESTION
from dejakv_models.docs_facts import ATTRIBUTES, FILLERS, NAMES, OPENINGS

PAD, UNK = "<pad>", "<unk>"
SPECIAL = (PAD, BOS, EOS, QUESTION, ANSWER, UNK)

# System messages are the document, user messages the questions; without a system message the last
# blank line of the
# first user message parts document and question. Ends where the answer begins if
# add_generation_prompt.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}{%- for part in content if part.type == 'text' -%}{{ part.text | trim }}{%- if not \
loop.last %} {% endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(document='', open=true) -%}
{%- for m in messages if m.role in ['system', 'developer'] -%}
{%- set ns.document = (ns.document ~ ' ' ~ text(m.content)) | trim -%}
{%- endfor -%}
{%- for m in messages if m.role in ['user', 'assistant'] -%}
{%- set said = text(m.content) | trim -%}
{%- if loop.first and m.role == 'user' and not ns.document and '\\n\\n' in said -%}
{%- set parts = said.rsplit('\\n\\n', 1) -%}
{%- set ns.document = parts[0] | trim -%}{%- set said = parts[1] | trim -%}
{%- endif -%}
{%- if loop.first -%}<s> {{ ns.document }}{%- endif -%}
{%- if m.role == 'user' %} <q> {{ said }}{%- if not loop.last or add_generation_prompt %} <a>{%- \
endif -%}
{%- else %} {{ said }} </s>{%- endif -%}
{%- endfor -%}"""


def vocabulary() -> list[str]:
    """Special tokens, words in alphabetical order, printable ASCII characters, the same characters
    as continuations.
    """
    templates = [*OPENINGS, *FILLERS]
    words: set[str] = set(NAMES)
    for a in ATTRIBUTES.values():
        templates += [*a.statements, *a.questions, *a.held_out_statements, *a.held_out_questions]
        words.update(a.values)
    for template in templates:
        words.update(re.findall(r"\w+", re.sub(r"\{\w\}", " ", template.lower())))
    characters = [c for c in string.printable if not c.isspace() and not c.isupper()]
    words -= set(characters)
    return [*SPECIAL, *sorted(words), *characters, *(f"##{c}" for c in characters)]


def save_tokenizer(folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as AutoTokenizer and vLLM read them
    (PreTrainedTokenizerFast).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary())}
    core = Tokenizer(models.WordPiece(vocab=ids, unk_token=UNK, max_input_chars_per_word=4096))
    core.normalizer = normalizers.BertNormalizer(
        lowercase=True, strip_accents=True, handle_chinese_chars=True
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[QUESTION, ANSWER],
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    # One file, not a separate chat_template.jinja: older readers look only here.
    jinja = folder / "chat_template.jinja"
    jinja.unlink(missing_ok=True)
    settings["chat_template"] = CHAT_TEMPLATE
    config.write_text(json.dumps(settings, indent=2) + "\n")
