import { Fragment } from "preact";
import { memo } from "preact/compat";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Column, Tokens, Turn } from "../data";
import { count, exact, short } from "../format";
import { SHADES, type Shade, shadeOf } from "../shade";
import { go, view } from "../view";
import { piecesOf } from "../visible";
import { Text } from "./text";

const AT_ONCE = 4000;

/** Every token with its numbers; what the loss sees is underlined. */
export function TokenView({ tokens, turns }: { tokens: Tokens; turns: Turn[] }) {
  const name = Object.hasOwn(SHADES, view.value.shade) ? view.value.shade : "logprob";
  const shade = useMemo(() => shadeOf(tokens, name), [tokens, name]);
  const chosen = view.value.token === "" ? null : Number(view.value.token);
  const [pointed, point] = useState<number | null>(null);
  const [asked, ask] = useState(AT_ONCE);
  const shown = Math.max(asked, (chosen ?? 0) + 1);
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => ask(AT_ONCE), [tokens]);
  useEffect(() => {
    const token = place.current?.querySelector(`[data-token="${chosen}"]`);
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
    go({ token: String(next) }, true);
  };
  return (
    <>
      <Legend name={name} shade={shade} />
      <TokenFacts tokens={tokens} index={pointed ?? chosen} />
      <div
        ref={place}
        class="tokens"
        role="group"
        aria-label="Tokens; arrow keys move through them"
        tabIndex={0}
        onPointerOver={(event) => point(indexAt(event))}
        onPointerLeave={() => point(null)}
        onClick={(event) => {
          const index = indexAt(event);
          if (index !== null) go({ token: String(index) }, true);
        }}
        onKeyDown={step}
      >
        <TokenSpans tokens={tokens} turns={turns} shade={shade} shown={shown} />
      </div>
      {shown < tokens.ids.length && (
        <button type="button" class="more" onClick={() => ask(shown + AT_ONCE)}>
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
          <input type="radio" name="shade" checked={key === name} onChange={() => go({ shade: key }, true)} /> {title}
        </label>
      ))}
      <span class="scale" aria-hidden="true">
        {shade.signed ? (
          <>
            −{short(shade.scale)} <i class="ramp negative" /> 0 <i class="ramp positive" /> +{short(shade.scale)}
          </>
        ) : (
          <>
            0 <i class="ramp positive" /> −{short(shade.scale)}
          </>
        )}
      </span>
      <span class="trained">in the loss</span>
      <span class="untrained">not in it</span>
    </div>
  );
}

/** Whether the run had such numbers at all. */
const given = (column: Column | undefined): boolean => column?.some((value) => value !== null) ?? false;

/** The numbers of a token: the one under the pointer, else the one that was chosen. */
function TokenFacts({ tokens, index }: { tokens: Tokens; index: number | null }) {
  if (index === null || tokens.ids[index] === undefined)
    return <p class="token-facts muted">Point at a token, or click to keep it.</p>;
  const [engine, trainer] = [tokens.logprobs[index] ?? null, tokens.old_logprobs[index] ?? null];
  const facts: [string, string][] = [
    ["token", String(index)],
    ["id", String(tokens.ids[index])],
    ["log-prob in the engine", exact(engine)],
    ["probability", engine === null ? "–" : short(Math.exp(engine))],
    ["log-prob in the trainer", exact(trainer)],
    ["gap", engine === null || trainer === null ? "–" : short(trainer - engine)],
    ["advantage", exact(tokens.advantages[index])],
    ...(given(tokens.ref_logprobs)
      ? [["log-prob in the reference", exact(tokens.ref_logprobs?.[index])] as [string, string]]
      : []),
    ...(given(tokens.rewards) ? [["reward", exact(tokens.rewards?.[index])] as [string, string]] : []),
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

/** White space has signs here, too. */
function TokenText({ value }: { value: string }) {
  return <Text value={value.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥")} />;
}

/** Thousands of spans: drawn anew only if what they show changes. */
const TokenSpans = memo(
  ({ tokens, turns, shade, shown }: { tokens: Tokens; turns: Turn[]; shade: Shade; shown: number }) => {
    const begins = new Map(turns.map((turn, index) => [tokens.prompt + turn.start, index + 1]));
    const restarts = new Set(tokens.restarts?.map(({ start }) => start));
    return tokens.ids.slice(0, shown).map((_, index) => {
      const turn = begins.get(index);
      const strength = shade.strength[index] ?? 0;
      const kind = `${tokens.trained[index] ? "trained" : "untrained"} ${strength < 0 ? "negative" : "positive"}`;
      return (
        <Fragment key={index}>
          {restarts.has(index) && <b class="marker">another prompt</b>}
          {turn !== undefined && <b class="marker">turn {turn}</b>}
          <span
            class={`token ${kind}`}
            data-token={index}
            style={strength ? { "--strength": Math.abs(strength).toFixed(3) } : undefined}
          >
            <Shown value={tokens.texts[index] ?? ""} />
          </span>
        </Fragment>
      );
    });
  },
);

/** A line's end is seen, and ends the line; an empty text has a sign. */
function Shown({ value }: { value: string }) {
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
