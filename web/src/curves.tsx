// Live curves of one run: the return first, then every metric in its group, with one sentence each.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, post, type Columns, type Curves, type Glossary, type Row } from "./api";
import { Chart, type Line, type Stretch } from "./chart";
import { short } from "./format";
import { useQuery, type Route } from "./route";
import { smooth } from "./smooth";
import { Choice, Slider, usePolling } from "./widgets";

export const AXES = [["env_steps", "env steps"], ["frames", "frames"], ["updates", "updates"], ["minutes", "minutes"]] as const;
const TRAIN_RETURNS = ["collect/episode_return", "collect/episode_return_mean", "collect/return_mean", "collect/return"];
const HEAD = new Set(["env_steps", "updates", "wall_s", "phase"]);

/** The columns of a run, kept up to date. */
export function useColumns(id: string, onRow: (row: Row) => void, onError: (text: string | null) => void): Columns | null {
  const held = useRef<{ id: string; epoch: number; count: number; columns: Columns } | null>(null);
  const [columns, setColumns] = useState<Columns | null>(null);
  usePolling(async () => {
    const old = held.current?.id === id ? held.current : null;
    try {
      const answer = await get<Curves>("/api/curves", { run: id, epoch: old?.epoch ?? 0, count: old?.count ?? 0 });
      onError(null);
      onRow(answer.row);
      if (old && answer.epoch === old.epoch && answer.start === old.count && answer.count === old.count) return;
      const merged = old && answer.start > 0 ? appended(old.columns, answer.columns) : answer.columns;
      held.current = { id, epoch: answer.epoch, count: answer.count, columns: merged };
      setColumns(merged);
    } catch (error) {
      onError(error instanceof TypeError ? "The connection to the server is lost; trying again…" : String((error as Error).message));
    }
  }, 1, [id]);
  return columns;
}

function appended(old: Columns, more: Columns): Columns {
  const length = old.phase.length;
  const added = more.phase.length;
  const names = new Set([...Object.keys(old), ...Object.keys(more)]);
  const all: Record<string, unknown[]> = {};
  for (const name of names) {
    all[name] = [...(old[name] ?? Array(length).fill(null)), ...(more[name] ?? Array(added).fill(null))];
  }
  return all as Columns;
}

function positions(columns: Columns, axis: string, repeat: number): (number | null)[] {
  if (axis === "minutes") return (columns.wall_s ?? []).map((value) => (value === null ? null : value / 60));
  if (axis === "frames") return (columns.env_steps ?? []).map((value) => (value === null ? null : value * repeat));
  return columns[axis] ?? [];
}

function points(x: (number | null)[], y: (number | null)[]): { x: number[]; y: number[] } {
  const out = { x: [] as number[], y: [] as number[] };
  y.forEach((value, index) => {
    const at = x[index];
    if (value !== null && at !== null && at !== undefined) {
      out.x.push(at);
      out.y.push(value);
    }
  });
  return out;
}

function phases(columns: Columns, x: (number | null)[]): Stretch[] {
  const found: Stretch[] = [];
  columns.phase.forEach((label, index) => {
    const at = x[index];
    if (at === null || at === undefined) return;
    const last = found.at(-1);
    if (last && last.label === label) last.to = at;
    else found.push({ label, from: last ? last.to : at, to: at, colour: `var(--c${found.length % 8})` });
  });
  return found.length > 1 ? found : [];
}

function curve(columns: Columns, x: (number | null)[], name: string, weight: number, tint: string): Line[] {
  const own = points(x, columns[name]);
  if (!weight || own.x.length < 4) return [{ label: name, ...own, colour: tint, dots: own.x.length < 2 }];
  return [
    { label: `${name} (raw)`, ...own, colour: tint, alpha: 0.28, width: 1 },
    { label: name, x: own.x, y: smooth(own.y, weight), colour: tint, width: 2 },
  ];
}

export function CurvesTab({ route, columns, repeat }: { route: Route; columns: Columns | null; repeat: number }) {
  const [axis, setAxis] = useQuery(route, "x", "env_steps");
  const [weightText, setWeight] = useQuery(route, "smooth", "0.6");
  const [filter, setFilter] = useQuery(route, "metric", "");
  const [glossary, setGlossary] = useState<Glossary | null>(null);
  const weight = Number(weightText);
  const names = useMemo(() => Object.keys(columns ?? {}).filter((name) => !HEAD.has(name)), [columns && Object.keys(columns).join()]);
  useEffect(() => {
    if (names.length) post<Glossary>("/api/glossary", {}, names).then(setGlossary, () => undefined);
  }, [names.join()]);

  if (!columns) return <p class="quiet">Reading metrics.jsonl…</p>;
  if (!names.length) return <p class="quiet">Nothing has been logged yet. The first row comes when the run logs for the first time.</p>;
  const x = positions(columns, axis, repeat);
  const stretches = phases(columns, x);
  const label = AXES.find(([key]) => key === axis)?.[1] ?? axis;
  const groups = (glossary?.groups ?? [{ title: "Metrics", text: "", open: true, names }])
    .map((group) => ({ ...group, names: group.names.filter((name) => columns[name] && name.includes(filter)) }))
    .filter((group) => group.names.length);
  return (
    <>
      <div class="toolbar">
        <Choice label="over" value={axis as "env_steps"} options={AXES} change={setAxis} />
        <Slider label="smoothing" value={weight} min={0} max={0.98} step={0.02} change={(value) => setWeight(String(value))} />
        <input type="search" placeholder="Find a metric" aria-label="Find a metric" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        <span class="quiet small">drag to zoom, double-click to go back</span>
      </div>
      {!filter && <ReturnChart columns={columns} x={x} weight={weight} stretches={stretches} label={label} />}
      {groups.map((group) => (
        <details class="card" open={group.open || !!filter}>
          <summary>{group.title} <span class="quiet">({group.names.length})</span></summary>
          <p class="quiet">{group.text}</p>
          <div class="grid">
            {group.names.map((name, index) => (
              <Metric key={name} name={name} columns={columns} x={x} weight={weight} stretches={stretches}
                tint={`var(--c${index % 8})`} text={glossary?.sentences[name] ?? ""} />
            ))}
          </div>
        </details>
      ))}
    </>
  );
}

function Metric(props: {
  name: string; columns: Columns; x: (number | null)[]; weight: number; stretches: Stretch[]; tint: string; text: string;
}) {
  const { name, columns, x, weight, tint } = props;
  const lines = useMemo(() => curve(columns, x, name, weight, tint), [columns, x.length, name, weight, tint, x[1]]);
  const known = columns[name].filter((value) => value !== null);
  return (
    <figure>
      <div class="name">{name}<span>{short(known.at(-1))}</span></div>
      <Chart lines={lines} height={150} sync="run" stretches={props.stretches} label={name} />
      <p>{props.text}</p>
    </figure>
  );
}

function ReturnChart(props: { columns: Columns; x: (number | null)[]; weight: number; stretches: Stretch[]; label: string }) {
  const { columns, x, weight } = props;
  const name = TRAIN_RETURNS.find((entry) => columns[entry]);
  const lines = useMemo(() => {
    const found: Line[] = name ? curve(columns, x, name, weight, "var(--c0)") : [];
    if (columns["eval/return_mean"]) {
      const own = points(x, columns["eval/return_mean"]);
      found.push({ label: "evaluation", ...own, colour: "var(--c1)", dots: true });
    }
    return found;
  }, [columns, name, weight, x.length, x[1]]);
  if (!lines.length) return null;
  return (
    <section>
      <h2>Return</h2>
      <p class="quiet">Training episodes as a line (faint: as they were logged), evaluations as dots.</p>
      <Chart lines={lines} height={280} sync="run" stretches={props.stretches} label="Return" xLabel={props.label} legend />
    </section>
  );
}
