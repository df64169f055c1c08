from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.skyrl.shell_parser import ShellScript, display_word, parse_commands, quote_word, unexpanded_parts

PLAIN = r"""
set -x
# A comment with an apostrophe: it isn't read.
DATA_DIR="$HOME/data/gsm8k"   # another
NUM_GPUS=4; TP=2 && CP=1
MODEL='Qwen/Qwen3-0.6B'
STOP='["</sql>", "</solution>"]'
NAME="run_tp${TP}_${MODEL}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  generator.sampling_params.stop="$STOP" \
  generator.eval_sampling_params.stop='["</a>"]' trainer.seed=1\
  trainer.run_name=${NAME}_$NUM_GPUS \
  empty="" \
  say="a \"b\" \$HOME \n" bare=a\ b\
c \
  $@
"""
DEFAULTS = r"""
: "${NUM_GPUS:=4}"
: "${DATA_DIR:="$HOME/data"}"
: "${LOGGER:=wandb}" "${EMPTY:=}"
LENGTH=$((1024 * 2)) WORKERS=$(( NUM_GPUS * (LENGTH + 1) / 3 % 100 - 1 ))
TAG="${TAG:-none}${UNSET-x}${EMPTY:-y}${EMPTY-z}${TAG:+!}${LOGGER:+${LOGGER}s}"
export RAY_X="${RAY_X:-900}" Y=2
A=1 B="$LENGTH" uv run a="$NUM_GPUS" d="$DATA_DIR" w=$WORKERS t=$TAG l=$LOGGER r=$RAY_X$Y "${EMPTY}" $EMPTY
"""
ARRAYS = r"""
TEXT=
ARGS=(a=1 "b=2 3"   # why
  'c=$HOME')
ARGS+=("d=$TEXT-")
EXTRA="e=5 f=6"
EXTRA="$EXTRA g=7"
TEXT=x; TEXT+=y
DRIVER=(uv run -- python)
"${DRIVER[@]}" -m module "${ARGS[@]}" $EXTRA "$EXTRA" ${NOTHING[@]} "$TEXT" "$@" 2>&1 | tee "log.txt"
uv last > out.txt < /dev/null 2>/dev/null
"""
CONDITIONS = r"""
MODE=on NOTHING=
if [ "$MODE" = "on" ]; then
  A=1
elif [ "$MODE" != "on" ]; then
  A=2
else
  A=3
fi
if [[ -n "$NOTHING" ]]; then A=4; else B="$A"; fi
if [ "$MODE" == "off" ]
then
  if [ "$A" = 1 ]; then B=9; fi
fi
cat <<EOF > /dev/null
don't read "this
EOF
say() {
  echo "A=$1"
}
uv run a=$A b=$B
"""
OPERATORS = r"""
X=1 Y=2 N=8 MODEL=org/name.v1.gguf
[ -z "$X" ] && X=5
[ "$X" = 1 ] || X=6
[[ -n "$X" ]] && [ "$Y" = 3 ] && X=7
mkdir -p out && Z=1 || Z=2
if [ "$X" = 1 ] && [ "$Y" = 3 ]; then A=1; elif ! [ "$N" -le 4 ] || [ "$Y" = 3 ]; then A=2; else A=3; fi
if [ "$X" != 1 ] || test "$Y" = 2; then
  B=1
else
  B=2
fi
false_name=${1#*=} ; FIRST=$1 COUNT=$#
shift
NONE=() ; declare -a MORE=(m n); export P=1 Q R=2
function other {
  echo "$1"
}
(true &&
  uv run in=subshell)
LIST=(a b c)
uv run x=$X z=$Z a=$A b=$B f=$false_name $FIRST c=$COUNT ${LIST[1]} "${NONE[@]}" "${MORE[@]}" $P$R "$@" \
  ${MODEL##*/} ${MODEL#*/} ${MODEL%.*} \
  ${MODEL%%.*} ${MODEL/name/other} ${MODEL//./_} $(dirname "$(dirname "a/b/c")") \
  $(cd -- "$(dirname -- "$(realpath $0)")/out/.." && pwd)/x
set -- s=1 "$@"
uv run $@
"""


def run_in_shell(text: str, arguments: list[str], folder: Path) -> list[list[str]]:
    """Return the arguments with which a shell runs each `uv` command of a script."""
    (folder / "uv").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\1' >> uv.txt\n")
    (folder / "uv").chmod(0o755)
    (folder / "script.sh").write_text(text)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/home/me"}
    subprocess.run(["bash", "script.sh", *arguments], cwd=folder, env=environment, capture_output=True, check=True)
    recorded = (folder / "uv.txt").read_text().split("\1\0")
    return [command.split("\0")[:-1] for command in recorded[:-1]]


SCRIPTS = {"plain": PLAIN, "defaults": DEFAULTS, "arrays": ARRAYS, "if": CONDITIONS, "operators": OPERATORS}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_words_match_shell(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["x=1", "y=2 3"]
    monkeypatch.chdir(tmp_path)
    script = ShellScript("script.sh", arguments=arguments)
    parsed = [command.words[1:] for command in parse_commands(text, script) if command.words[0] == "uv"]
    assert [[display_word(word, {"HOME": "/home/me"}) for word in words] for words in parsed] == run_in_shell(
        text, arguments, tmp_path
    )
    assert script.unresolved == []


def test_parser_runs_no_command(tmp_path: Path):
    file = tmp_path / "made"
    command = f"touch {file}"
    text = f"A=$({command})\nB=`{command}`\n{command}\neval {command}\nuv run a=$A b=$B c=$((A[$({command})]))"
    (words,) = [command.words for command in parse_commands(text, ShellScript("script.sh")) if command.words[0] == "uv"]
    assert [display_word(word) for word in words[2:4]] == [f"a=$({command})", f"b=`{command}`"]
    assert not file.exists()


def test_unresolvable_parts_stay_for_the_shell():
    line = 'uv run name="$RUN" user=$USER "path=$(dirname "$0")/x" where=${BASH_SOURCE[0]} n=$((N + 1))'
    text = f"RUN=run-$(date +%s)\n{line}"
    (command,) = list(parse_commands(text, ShellScript("recipes/mine.sh")))
    words = command.words
    assert list(map(quote_word, words[2:])) == [
        '"name=run-$(date +%s)"',
        '"user=$USER"',
        "path=recipes/x",
        "where=recipes/mine.sh",
        '"n=$((N + 1))"',
    ]
    assert unexpanded_parts(words[2]) == ["$(date +%s)"]
    assert quote_word("a 'b' $c") == "'a '\"'\"'b'\"'\"' $c'"


def test_environment_sets_variables_with_defaults():
    text = ': "${N:=4}"\nM=5\nuv n=$N m=$M'
    (command,) = list(parse_commands(text, ShellScript("script.sh", environment={"N": "1", "M": "9"})))[1:]
    assert command.words == ["uv", "n=1", "m=5"]


def test_undecided_assignments_are_reported():
    text = (
        "if [ -f x ]; then A=1; fi\nfor i in 1 2; do B=$i; done\n[[ $C == a* ]] && C=1\nlet D=1\n"
        "if [ a = b ] || nvidia-smi; then E=1; fi; which uv || A=9; L[0]=1\nuv a=$A b=$B"
    )
    script = ShellScript("script.sh")
    *_, command = parse_commands(text, script)
    assert [display_word(word) for word in command.words] == ["uv", "a=$A", "b=$B"]
    assert script.unresolved == ["A=1", "B=$i", "C=1", "let D=1", "E=1", "A=9", "L[0]=1"]


@pytest.mark.parametrize("text", ['A="x', "A=(1 2", "A=$(date", "A=${B", "A='"])
def test_unclosed_quotes_raise_error_with_line(text: str):
    with pytest.raises(ConfigError, match=r"mine\.sh, line 2: a closing . is missing"):
        list(parse_commands(f"\n{text}", ShellScript("mine.sh")))
