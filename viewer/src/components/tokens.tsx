import { Fragment } from "preact";
import { memo } from "preact/compat";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Column, Sample, Tokens } from "../data";
import { count, exact, rough, short } from "../format";
import { SHADES, type Shade, shadeOf } from "../tokenShading";
import { updateView, view } from "../view";
import { piecesOf } from "../invisibleCharacters";
import { SafeText } from "./text";

const MAX_TOKENS_RENDERED = 4000;

/** The tokens of a sample, shaded by a value. Tokens in the loss are underlined. */
export function TokenView({ sample, tokens }: { sample: Sample; tokens: Tokens }) {
  const name = Object.hasOwn(SHADES, view.value.shade) ? view.value.shade : "logprob";
  const shade = useMemo(() => shadeOf(tokens, name), [tokens, name]);
  const marks = useMemo(() => marksOf(sample, tokens), [sample, tokens]);
  const chosen = view.value.token === "" ? null : Number(view.value.token);
  const [pointed, point] = useState<number | null>(null);
  const [limit, setLimit] = useState(MAX_TOKENS_RENDERED);
  const shown = Math.max(limit, (chosen ?? 0) + 1);
  const container = useRef<HTMLDivElement>(null);
  useEffect(() => setLimit(MAX_TOKENS_RENDERED), [tokens]);
  useEffect(() => {
    const token = container.current?.querySelector(`[data-token="${chosen}"]`);
    token?.classList.add("chosen");
    token?.scrollIntoView({ block: "nearest" });
    return () => token?.classList.remove("chosen");
  }, [chosen, tokens, shade, shown]);
  const indexAt = (event: Event) => {
    const token = event.target instanceof Element && event.target.closest<HTMLElement>("[data-token]");
    return token ? Number(token.dataset.token) : null;
  };
  const step = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = chosen === null ? 0 : Math.min(tokens.ids.length - 1, Math.max(0, chosen + by));
    updateView({ token: String(next) }, true);
  };
  return (
    <>
      <Legend name={name} shade={shade} />
      <TokenFacts tokens={tokens} index={pointed ?? chosen} />
      <div
        ref={container}
        class="tokens"
        role="group"
        aria-label="Tokens; arrow keys move through them"
        tabIndex={0}
        onPointerOver={(event) => point(indexAt(event))}
        onPointerLeave={() => point(null)}
        onClick={(event) => {
          const index = indexAt(event);
          if (index !== null) updateView({ token: String(index) }, true);
        }}
        onKeyDown={step}
      >
        <TokenSpans tokens={tokens} marks={marks} shade={shade} shown={shown} />
      </div>
      {shown < tokens.ids.length && (
        <button type="button" class="more" onClick={() => setLimit(shown + MAX_TOKENS_RENDERED)}>
          Show more of {count(tokens.ids.length)} tokens
        </button>
      )}
    </>
  );
}

function Legend({ name, shade }: { name: string; shade: Shade }) {
  return (
    <div class="controls" role="group" aria-label="Shading">
      {Object.entries(SHADES).map(([key, { title }]) => (
        <label key={key}>
          <input
            type="radio"
            name="shade"
            checked={key === name}
            onChange={() => updateView({ shade: key }, true)}
          />{" "}
          {title}
        </label>
      ))}
      <span class="token-legend">
        <span class="scale" aria-hidden="true">
          {shade.signed ? (
            <>
              −{rough(shade.scale)} <i class="ramp negative" /> 0 <i class="ramp positive" /> +{rough(shade.scale)}
            </>
          ) : (
            <>
              0 <i class="ramp positive" /> −{rough(shade.scale)}
            </>
          )}
        </span>
        <span class="trained">in the loss</span>
        <span class="untrained">not in the loss</span>
      </span>
    </div>
  );
}

/** True if the column has any value: the run may not have computed it. */
const hasValues = (column: Column | undefined): boolean => column?.some((value) => value !== null) ?? false;

/** The values of a token: the one under the pointer, else the selected one. */
function TokenFacts({ tokens, index }: { tokens: Tokens; index: number | null }) {
  if (index === null || tokens.ids[index] === undefined)
    return <p class="token-facts muted">Point at a token, or click to select it.</p>;
  const [engine, trainer] = [tokens.logprobs[index] ?? null, tokens.old_logprobs[index] ?? null];
  const facts: [string, string][] = [
    ["token", String(index)],
    ["id", String(tokens.ids[index])],
    ["log-prob in the engine", exact(engine)],
    ["probability", engine === null ? "–" : short(Math.exp(engine))],
    ["log-prob in the trainer", exact(trainer)],
    ["gap", engine === null || trainer === null ? "–" : short(trainer - engine)],
    ["advantage", exact(tokens.advantages[index])],
    ...(hasValues(tokens.ref_logprobs)
      ? [["log-prob in the reference", exact(tokens.ref_logprobs?.[index])] as [string, string]]
      : []),
    ...(hasValues(tokens.rewards) ? [["reward", exact(tokens.rewards?.[index])] as [string, string]] : []),
    ["in the loss", tokens.trained[index] ? "yes" : "no"],
  ];
  return (
    <dl class="token-facts">
      <div>
        <dt>text</dt>
        <dd class="token-text">
          <TokenText value={tokens.texts[index] ?? ""} />
        </dd>
      </div>
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Index of a token -> what begins with it: a turn, or a call of a session, whose sequences have another order. */
function marksOf({ turns, session }: Sample, tokens: Tokens): Map<number, string> {
  const [kind, spans] = session ? ["call", session.calls] : ["turn", turns];
  return new Map(spans.map(({ start }, index) => [tokens.prompt + start, `${kind} ${index + 1}`]));
}

/** The text of a token with signs for white space. */
function TokenText({ value }: { value: string }) {
  return <SafeText value={value.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥")} />;
}

/** The spans of all tokens, memoized because there are thousands of them. */
const TokenSpans = memo(
  ({ tokens, marks, shade, shown }: { tokens: Tokens; marks: Map<number, string>; shade: Shade; shown: number }) => {
    const restarts = new Set(tokens.restarts?.map(({ start }) => start));
    return tokens.ids.slice(0, shown).map((_, index) => {
      const mark = marks.get(index);
      const strength = shade.strength[index] ?? 0;
      const kind = `${tokens.trained[index] ? "trained" : "untrained"} ${strength < 0 ? "negative" : "positive"}`;
      return (
        <Fragment key={index}>
          {restarts.has(index) && <b class="marker">new prompt</b>}
          {mark !== undefined && <b class="marker">{mark}</b>}
          <span
            class={`token ${kind}`}
            data-token={index}
            style={strength ? { "--strength": Math.abs(strength).toFixed(3) } : undefined}
          >
            <TokenPieces value={tokens.texts[index] ?? ""} />
          </span>
        </Fragment>
      );
    });
  },
);

/** The text of a token, with signs for line ends, invisible characters and the empty text. */
function TokenPieces({ value }: { value: string }) {
  if (value === "") return <i class="hidden-sign">∅</i>;
  return piecesOf(value.replaceAll("\n", "↵\n")).map((piece) =>
    "text" in piece ? (
      piece.text
    ) : (
      <i class="hidden-sign" title={piece.code}>
        {piece.sign}
      </i>
    ),
  );
}
