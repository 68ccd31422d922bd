// The table of runs: search, filter, sort, group; keyboard first.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Row } from "./api";
import { duration, short, when } from "./format";
import { link, useQuery, type Route } from "./route";
import { Badge, Choice, useKeys } from "./widgets";

type Column = { key: string; title: string; value: (row: Row) => string | number | null; shown: (row: Row) => string };

const progress = (row: Row) => row.total_steps ? `${short(row.env_steps)} of ${short(row.total_steps)}` : short(row.env_steps);
const returns = (row: Row) => row.eval_return ?? row.train_return;

const COLUMNS: Column[] = [
  { key: "experiment", title: "experiment", value: (row) => row.experiment, shown: (row) => row.experiment },
  { key: "name", title: "run", value: (row) => row.name, shown: (row) => row.name },
  { key: "status", title: "status", value: (row) => row.status, shown: (row) => row.status },
  { key: "phase", title: "phase", value: (row) => row.phase, shown: (row) => row.phase || "–" },
  { key: "return", title: "last return", value: returns, shown: (row) => short(returns(row)) + (row.eval_return === null && row.train_return !== null ? " (training)" : "") },
  { key: "env_steps", title: "env steps", value: (row) => row.env_steps, shown: progress },
  { key: "speed", title: "steps/s", value: (row) => row.speed, shown: (row) => short(row.speed, 3) },
  { key: "left_s", title: "time left", value: (row) => row.left_s, shown: (row) => duration(row.left_s) },
  { key: "wall_s", title: "wall time", value: (row) => row.wall_s, shown: (row) => duration(row.wall_s) },
  { key: "start", title: "started", value: (row) => row.start, shown: (row) => when(row.start) },
];
const NUMERIC = new Set(["return", "env_steps", "speed", "left_s", "wall_s"]);
const NARROW = new Set(["experiment", "name", "status", "return"]); // on a phone, too
const ROOMY = new Set(["phase", "speed", "wall_s", "start"]); // on a wide window only
const widthClass = (key: string) => (NARROW.has(key) ? "" : ROOMY.has(key) ? "roomy roomiest" : "roomy");
const STATUSES = [["", "any status"], ["running", "running"], ["completed", "completed"], ["interrupted", "interrupted"], ["failed", "failed"], ["lost", "stopped without a word"]] as const;
const PAGE = 150;

export function Runs({ route, rows, root, loaded }: { route: Route; rows: Map<string, Row>; root: string; loaded: boolean }) {
  const [search, setSearch] = useQuery(route, "q", "");
  const [status, setStatus] = useQuery(route, "status", "");
  const [sort, setSort] = useQuery(route, "sort", "-start");
  const [group, setGroup] = useQuery(route, "group", "experiment");
  const [closed, setClosed] = useState<Set<string>>(new Set());
  const [picked, setPicked] = useState<Set<string>>(new Set());
  const [focus, setFocus] = useState(0);
  const [limit, setLimit] = useState(PAGE);
  const box = useRef<HTMLInputElement>(null);
  const end = useRef<HTMLDivElement>(null);

  const shown = useMemo(() => sorted(filtered([...rows.values()], search, status), sort), [rows, search, status, sort]);
  const lines = useMemo(() => (group ? grouped(shown, closed) : shown.map((row): TableLine => ({ row }))), [shown, group, closed]);
  const visible = lines.slice(0, limit);
  const columns = group ? COLUMNS.slice(1) : COLUMNS;
  const current = lines[Math.min(focus, lines.length - 1)]?.row;

  useEffect(() => {
    const watcher = new IntersectionObserver((entries) => entries[0].isIntersecting && setLimit((old) => old + PAGE));
    if (end.current) watcher.observe(end.current);
    return () => watcher.disconnect();
  }, [lines.length]);
  useEffect(() => document.querySelector(".runs tr.focus")?.scrollIntoView({ block: "nearest" }), [focus]);

  const toggle = (id: string) => setPicked(flipped(picked, id));
  const move = (by: number) => setFocus(Math.max(0, Math.min(lines.length - 1, focus + by)));
  useKeys({
    "/": () => box.current?.focus(),
    j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
    Enter: () => current && (location.hash = link("run", { id: current.id })),
    d: () => current?.can_dream && (location.hash = link("dream", { id: current.id })),
    x: () => current && toggle(current.id),
    c: () => picked.size && (location.hash = link("compare", { run: [...picked] })),
    g: () => setGroup(group ? "" : "experiment"),
  });

  if (loaded && !rows.size) return <Empty root={root} />;
  return (
    <div class="wide">
      <div class="toolbar">
        <input ref={box} class="search" type="search" placeholder="Search runs  ( / )" aria-label="Search runs" value={search}
          onInput={(event) => setSearch(event.currentTarget.value)} />
        <Choice label="" value={status} options={STATUSES} change={setStatus} title="Show runs with this status" />
        <label class="field inline"><input type="checkbox" checked={!!group} onChange={() => setGroup(group ? "" : "experiment")} /> group by experiment</label>
        <span class="quiet" role="status">{loaded ? <>{shown.length} of {rows.size} runs in <span title={root}>{root.split("/").at(-1)}</span></> : "Reading the runs…"}</span>
        <a class={`button ${picked.size ? "" : "off"}`} href={picked.size ? link("compare", { run: [...picked] }) : undefined}>Compare {picked.size || ""}</a>
      </div>
      <div class="card table-card">
        <table class="runs" aria-label="Runs">
          <thead><tr>
            <th class="tick"><span class="hidden">select</span></th>
            {columns.map((column) => <Head column={column} sort={sort} change={setSort} />)}
            <th class="last"><span class="hidden">play</span></th>
          </tr></thead>
          <tbody>
            {visible.map((line, index) => line.row
              ? <Line row={line.row} columns={columns} isFocus={index === focus} isPicked={picked.has(line.row.id)} toggle={toggle} look={() => setFocus(index)} />
              : <GroupLine group={line.group!} isClosed={closed.has(line.group!.name)} isFocus={index === focus}
                  flip={() => setClosed(flipped(closed, line.group!.name))} pick={(ids) => setPicked(new Set([...picked, ...ids]))} />)}
          </tbody>
        </table>
        <div ref={end} />
      </div>
      <p class="quiet small keys"><kbd>/</kbd> search <kbd>j</kbd> <kbd>k</kbd> move <kbd>Enter</kbd> open <kbd>d</kbd> dream <kbd>x</kbd> select <kbd>c</kbd> compare <kbd>g</kbd> group</p>
    </div>
  );
}

function Head({ column, sort, change }: { column: Column; sort: string; change: (value: string) => void }) {
  const state = sort === column.key ? "ascending" : sort === `-${column.key}` ? "descending" : "none";
  return (
    <th class={`${NUMERIC.has(column.key) ? "n" : ""} ${widthClass(column.key)}`} aria-sort={state}>
      <button class="plain" onClick={() => change(state === "descending" ? column.key : `-${column.key}`)}>
        {column.title}{state === "ascending" ? " ↑" : state === "descending" ? " ↓" : ""}
      </button>
    </th>
  );
}

function Line(props: { row: Row; columns: Column[]; isFocus: boolean; isPicked: boolean; toggle: (id: string) => void; look: () => void }) {
  const { row } = props;
  const open = () => (location.hash = link("run", { id: row.id }));
  return (
    <tr class={props.isFocus ? "focus" : ""} onClick={props.look} onDblClick={open} data-run={row.id}>
      <td class="tick"><input type="checkbox" aria-label={`Select ${row.id}`} checked={props.isPicked} onChange={() => props.toggle(row.id)} /></td>
      {props.columns.map((column) => (
        <td class={`${NUMERIC.has(column.key) ? "n" : ""} ${widthClass(column.key)} col-${column.key}`}>
          {column.key === "status" ? <Badge status={row.status} />
            : column.key === "name" ? <a href={link("run", { id: row.id })}>{row.name.split("-").flatMap((part, index) => (index ? ["-", <wbr />, part] : [part]))}</a>
            : column.shown(row)}
          {column.key === "env_steps" && row.status === "running" && row.total_steps
            ? <progress value={row.env_steps ?? 0} max={row.total_steps} aria-label="progress" /> : null}
        </td>
      ))}
      <td class="n last">{row.can_dream && <a class="button small" href={link("dream", { id: row.id })} title="Play inside this run's world model">Dream</a>}</td>
    </tr>
  );
}

type Group = { name: string; rows: Row[] };
type TableLine = { row?: Row; group?: Group };

function GroupLine(props: { group: Group; isClosed: boolean; isFocus: boolean; flip: () => void; pick: (ids: string[]) => void }) {
  const { name, rows } = props.group;
  const scores = rows.map((row) => row.eval_return).filter((value): value is number => value !== null);
  const mean = scores.length ? scores.reduce((sum, value) => sum + value, 0) / scores.length : null;
  const running = rows.filter((row) => row.status === "running").length;
  return (
    <tr class={`group ${props.isFocus ? "focus" : ""}`}>
      <td class="tick"></td>
      <td colSpan={2}>
        <button class="plain" aria-expanded={!props.isClosed} onClick={props.flip}>{props.isClosed ? "▸" : "▾"} {name}</button>
        <span class="quiet"> {rows.length} run{rows.length === 1 ? "" : "s"}{running ? `, ${running} running` : ""}</span>
      </td>
      <td class="roomy roomiest"></td>
      <td class="n">{mean === null ? "" : <span title={`mean of ${scores.length} evaluations`}>∅ {short(mean)}</span>}</td>
      <td class="roomy"></td>
      <td class="roomy roomiest"></td>
      <td class="roomy"></td>
      <td class="roomy roomiest" colSpan={2}></td>
      <td class="n last"><button class="plain" onClick={() => props.pick(rows.map((row) => row.id))}>select all</button></td>
    </tr>
  );
}

function Empty({ root }: { root: string }) {
  return (
    <section class="narrow-page">
      <h1>No runs yet</h1>
      <p>There is no run in <code>{root}</code>. Start one, and it appears here by itself:</p>
      <pre>rl-lab train</pre>
    </section>
  );
}

function flipped(set: Set<string>, key: string): Set<string> {
  const next = new Set(set);
  if (!next.delete(key)) next.add(key);
  return next;
}

function filtered(rows: Row[], search: string, status: string): Row[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) => {
    const text = `${row.id} ${row.experiment} ${row.workflow} ${row.environment} ${row.status} ${row.phase} seed ${row.seed}`.toLowerCase();
    return (!status || row.status === status) && words.every((word) => text.includes(word));
  });
}

function sorted(rows: Row[], sort: string): Row[] {
  const down = sort.startsWith("-");
  const column = COLUMNS.find((entry) => entry.key === sort.replace("-", "")) ?? COLUMNS[0];
  return [...rows].sort((left, right) => {
    const [a, b] = [column.value(left), column.value(right)];
    if (a === null || a === "") return 1;
    if (b === null || b === "") return -1;
    return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
  });
}

function grouped(rows: Row[], closed: Set<string>): TableLine[] {
  const groups = new Map<string, Row[]>();
  for (const row of rows) groups.set(row.experiment, [...(groups.get(row.experiment) ?? []), row]);
  return [...groups].flatMap(([name, own]) => [
    { group: { name, rows: own } }, ...(closed.has(name) ? [] : own.map((row) => ({ row }))),
  ]);
}
