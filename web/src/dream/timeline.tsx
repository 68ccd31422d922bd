// The branch that is shown, over time: rewards, continuation, value, surprise, error, and the entries of vectors.
import { useMemo } from "preact/hooks";
import { Chart, type Line, type Stretch } from "../chart";
import { short } from "../format";
import type { DreamStore, Hello, Moment } from "./store";

const LOST = 5; // steps in a row at which the dream is worse than "nothing changes"
const ENTRIES = 8;

/** The first step from which on the dream was further from reality than a forecast that nothing changes. */
export function lostAt(path: Moment[]): number | null {
  let run = 0;
  for (const moment of path) {
    const blind = moment.time > moment.since && moment.error !== null && moment.baseline !== null;
    run = blind && moment.error! > moment.baseline! ? run + 1 : 0;
    if (run === LOST) return moment.time - LOST + 1;
  }
  return null;
}

type Get = (moment: Moment) => number | null | undefined;

function line(path: Moment[], label: string, colour: string, get: Get, dash?: number[]): Line {
  const known = path.filter((moment) => get(moment) !== null && get(moment) !== undefined);
  return { label, colour, dash, x: known.map((moment) => moment.time), y: known.map((moment) => get(moment)!), width: 1.8 };
}

export function Timeline({ store, hello, pick }: { store: DreamStore; hello: Hello; pick: (moment: Moment) => void }) {
  const current = store.current;
  const leaf = useMemo(() => newest(store, current), [store.moments.size, current?.id]);
  const path = store.path(leaf);
  const stamp = `${leaf?.id}:${path.length}`;
  const rows = useMemo(() => charts(path, hello), [stamp, hello]);
  const eyes = useMemo(() => watched(path), [stamp]);
  const lost = useMemo(() => lostAt(path), [stamp]);
  const onPick = (x: number) => {
    const found = path[Math.max(0, Math.min(path.length - 1, Math.round(x)))];
    if (found && found.id !== store.state?.current) pick(found);
  };
  return (
    <section class="timeline" aria-label="Timeline">
      <div class="toolbar">
        <h2>Timeline</h2>
        <input type="range" min={0} max={Math.max(0, path.length - 1)} value={current?.time ?? 0} aria-label="Moment"
          onInput={(event) => onPick(Number(event.currentTarget.value))} />
        <span class="quiet">step {current?.time ?? 0} of {Math.max(0, path.length - 1)}</span>
        {lost !== null ? <span class="bad">lost contact at step {lost}</span>
          : path.some((moment) => moment.error !== null) && <span class="quiet">the dream keeps contact</span>}
      </div>
      <div class="grid">
        {rows.map(({ title, text, lines }) => lines.some((entry) => entry.x.length) && (
          <figure>
            <div class="name">{title}<span>{lines.map((entry) => short(at(entry, current?.time ?? 0), 3)).join(" / ")}</span></div>
            <Chart lines={lines} height={110} sync="dream" label={title} stretches={eyes} marks={lost === null ? [] : [lost]}
              cursorAt={current?.time ?? null} onPick={onPick} />
            <p>{text}</p>
          </figure>
        ))}
      </div>
    </section>
  );
}

const at = (entry: Line, time: number) => entry.y[entry.x.indexOf(time)] ?? null;

/** The end of the branch that goes on from a moment along its newest children. */
function newest(store: DreamStore, from: Moment | null): Moment | null {
  if (!from) return null;
  const latest = new Map<number, Moment>();
  for (const moment of store.moments.values()) if (moment.parent !== null) latest.set(moment.parent, moment);
  let leaf = from;
  for (let next = latest.get(leaf.id); next; next = latest.get(leaf.id)) leaf = next;
  return leaf;
}

function watched(path: Moment[]): Stretch[] {
  const found: Stretch[] = [];
  for (const moment of path) {
    if (moment.time !== moment.since) continue;
    const last = found.at(-1);
    if (last && last.to === moment.time - 1) last.to = moment.time;
    else found.push({ from: moment.time, to: moment.time, label: "looking", colour: "var(--c2)" });
  }
  return found;
}

function charts(path: Moment[], hello: Hello): { title: string; text: string; lines: Line[] }[] {
  const real = "var(--c0)";
  const dream = "var(--c1)";
  const dashed = [4, 3];
  const rows = [
    { title: "reward: true / predicted", text: "What each step gave, and what the dream says it gave.",
      lines: [line(path, "true", real, (moment) => (moment.time ? moment.real?.reward : null)), line(path, "predicted", dream, (moment) => moment.dream_reward, dashed)] },
    { title: "goes on", text: "How surely the dream says that the episode goes on.", lines: [line(path, "continuation", dream, (moment) => moment.continuation)] },
    { title: "value", text: "The return that the critic expects from the dreamed state on.", lines: [line(path, "value", "var(--c4)", (moment) => moment.value)] },
    { title: "surprise, nats", text: "How much the last observation told the model beyond what it foresaw.", lines: [line(path, "surprise", "var(--c3)", (moment) => moment.surprise)] },
    { title: "error: dream / nothing changes", text: "How far the dream is from reality, beside a forecast that nothing changes.",
      lines: [line(path, "dream", "var(--c7)", (moment) => moment.error), line(path, "nothing changes", "var(--quiet)", (moment) => (moment.time > moment.since ? moment.baseline : null), dashed)] },
  ];
  hello.names.slice(0, ENTRIES).forEach((name, entry) => {
    const lines = [line(path, "true", real, (moment) => moment.seen?.[entry]), line(path, "dreamed", dream, (moment) => moment.dreamed[entry], dashed)];
    rows.push(hello.model.decodes ? { title: `${name}: true / dreamed`, text: "", lines } : { title: name, text: "", lines: lines.slice(0, 1) });
  });
  return hello.model.decodes ? rows : rows.filter((row) => !row.title.startsWith("error"));
}
