// One run: head with facts and actions, then its tabs.
import { useEffect, useState } from "preact/hooks";
import { get, mediaAddress, post, type Columns, type Detail, type Media, type Row } from "./api";
import { CurvesTab, useColumns } from "./curves";
import { bytes, duration, short, whole } from "./format";
import { link, useQuery, type Route } from "./route";
import { Badge, Card, Copy, Notice, usePolling } from "./widgets";

const TABS = [["curves", "Curves"], ["episodes", "Episodes"], ["model", "Imagination"], ["config", "Configuration"], ["events", "Plan & events"], ["system", "System"]] as const;

export function Run({ route }: { route: Route }) {
  const id = route.query.get("id") ?? "";
  const [tab, setTab] = useQuery(route, "tab", "curves");
  const [detail, setDetail] = useState<Detail | null>(null);
  const [row, setRow] = useState<Row | null>(null);
  const [trouble, setTrouble] = useState<string | null>(null);
  const columns = useColumns(id, setRow, setTrouble);
  usePolling(async () => setDetail(await get<Detail>("/api/run", { run: id })), 5, [id]);
  useEffect(() => setDetail(null), [id]);

  const shown = row ?? detail?.row;
  return (
    <main>
      <Notice text={trouble} />
      {shown && <Head row={shown} detail={detail} />}
      <div class="tabs">
        <div role="tablist" aria-label="Parts of the run" onKeyDown={(event) => turn(event, tab, setTab)}>
          {TABS.map(([key, title]) => (
            <button role="tab" id={`tab-${key}`} aria-selected={tab === key} tabIndex={tab === key ? 0 : -1} class={tab === key ? "on" : ""} onClick={() => setTab(key)}>{title}</button>
          ))}
        </div>
        {shown?.can_dream !== false && <a class="tab dream" href={link("dream", { id })}>Dream ▸</a>}
      </div>
      <div role="tabpanel" aria-labelledby={`tab-${tab}`}>
        {tab === "curves" ? <CurvesTab route={route} columns={columns} repeat={detail?.action_repeat ?? 1} />
          : !detail ? <p class="quiet">Reading the run…</p>
          : tab === "episodes" ? <Episodes detail={detail} columns={columns} />
          : tab === "model" ? <Imagination detail={detail} />
          : tab === "config" ? <Configuration detail={detail} />
          : tab === "events" ? <Events detail={detail} />
          : <System detail={detail} />}
      </div>
    </main>
  );
}

/** Arrow keys move between the tabs. */
function turn(event: KeyboardEvent, tab: string, choose: (key: string) => void) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const place = TABS.findIndex(([key]) => key === tab) + by;
  const next = TABS[(place + TABS.length) % TABS.length][0];
  choose(next);
  document.getElementById(`tab-${next}`)?.focus();
}

function Head({ row, detail }: { row: Row; detail: Detail | null }) {
  const [answer, setAnswer] = useState<string | null>(null);
  const stop = async () => {
    if (!confirm("Stop this run? It saves a checkpoint first and can go on later.")) return;
    try {
      await post("/api/stop", { run: row.id });
      setAnswer("Asked to stop: the run writes a checkpoint and ends.");
    } catch (error) {
      setAnswer((error as Error).message);
    }
  };
  const facts: [string, string][] = [
    [row.eval_return === null ? "last training return" : "evaluation return", short(row.eval_return ?? row.train_return)],
    ["env steps", row.total_steps ? `${whole(row.env_steps)} / ${whole(row.total_steps)}` : whole(row.env_steps)],
    ["updates", whole(row.updates)], ["steps per second", short(row.speed, 3)],
    row.left_s !== null ? ["time left", duration(row.left_s)] : ["wall time", duration(row.wall_s)],
    ["parameters", short(row.parameters)],
  ];
  return (
    <header>
      <h1>{row.experiment} <Badge status={row.status} /></h1>
      <p class="quiet">{row.workflow}{row.size ? ` (size ${row.size})` : ""} on {row.environment}, seed {row.seed}{row.phase ? `, phase ${row.phase}` : ""}, {row.device}</p>
      <Notice text={row.error} />
      <div class="facts">
        {facts.map(([label, value], index) => <div class={index ? "" : "main"}><b>{value}</b><span class="quiet small">{label}</span></div>)}
      </div>
      <div class="toolbar actions">
        {row.can_dream && <a class="button strong" href={link("dream", { id: row.id })}>Step into the dream</a>}
        {row.status === "running" && <button onClick={stop}>Stop (it saves)</button>}
        {detail && <Copy text={detail.path} label="copy path" />}
        {detail && <CopyCommand commands={detail.commands} />}
        {detail?.has_report && <a class="plain" href={`/api/report?${new URLSearchParams({ run: row.id })}`} target="_blank" rel="noopener">report</a>}
        <a class="plain" href={link("compare", { run: [row.id] })}>compare</a>
      </div>
      <Notice text={answer} kind="warn" />
    </header>
  );
}

function CopyCommand({ commands }: { commands: Detail["commands"] }) {
  const [done, setDone] = useState("");
  const copy = async (name: string) => {
    const found = commands.find((entry) => entry.name === name);
    if (!found) return;
    await navigator.clipboard.writeText(found.command);
    setDone(name);
  };
  return (
    <select aria-label="Copy a command" value="" onChange={(event) => void copy(event.currentTarget.value)}>
      <option value="">{done ? `copied: ${done}` : "copy a command…"}</option>
      {commands.map((entry) => <option value={entry.name} title={entry.command}>{entry.name}</option>)}
    </select>
  );
}

function Episodes({ detail, columns }: { detail: Detail; columns: Columns | null }) {
  const videos = detail.media.filter((file) => file.folder === "videos");
  const keys = ["return_mean", "return_std", "return_min", "return_max", "length_mean", "episodes"];
  const rows = (columns?.["eval/return_mean"] ?? [])
    .map((value, index) => ({ value, index }))
    .filter((entry) => entry.value !== null).reverse();
  return (
    <>
      <Card title="Films" text="Evaluation episodes, the newest first. They are played with held-out seeds and without exploration.">
        {videos.length ? <div class="media">{[...videos].reverse().map((file) => <Film run={detail.id} file={file} />)}</div>
          : <p class="quiet">No film yet: evaluation.video=true records one at each evaluation.</p>}
      </Card>
      <Card title="Evaluations">
        {rows.length ? <div class="scroll"><table>
          <thead><tr><th class="n">env steps</th><th class="n">updates</th>{keys.map((key) => <th class="n">{key.replace("_", ", ")}</th>)}</tr></thead>
          <tbody>{rows.map(({ index }) => (
            <tr><td class="n">{whole(columns!.env_steps?.[index])}</td><td class="n">{whole(columns!.updates?.[index])}</td>
              {keys.map((key) => <td class="n">{short(columns![`eval/${key}`]?.[index])}</td>)}</tr>
          ))}</tbody>
        </table></div> : <p class="quiet">Not evaluated yet.</p>}
      </Card>
    </>
  );
}

function Film({ run, file }: { run: string; file: Media }) {
  const caption = file.env_steps !== null ? `after ${whole(file.env_steps)} env steps`
    : file.folder === "imagination" ? "What happened, what the model imagined with its eyes closed, and the difference" : file.name;
  return <figure><video controls loop muted playsInline preload="metadata" src={mediaAddress(run, file)} /><figcaption>{caption}</figcaption></figure>;
}

function Pictures({ detail, folder }: { detail: Detail; folder: string }) {
  const files = detail.media.filter((file) => file.folder === folder);
  return (
    <>
      {files.filter((file) => file.name.endsWith(".png")).map((file) => (
        <div class="wide-scroll"><img class="wide" alt={`${folder}: ${file.name}`} src={mediaAddress(detail.id, file)} /></div>
      ))}
      <div class="media">{files.filter((file) => file.name.endsWith(".mp4")).map((file) => <Film run={detail.id} file={file} />)}</div>
    </>
  );
}

function Imagination({ detail }: { detail: Detail }) {
  const has = (folder: string) => detail.media.some((file) => file.folder === folder);
  const { expected_mean, received_mean } = detail.planning;
  return (
    <>
      <Card title="What the model imagines"
        text="The model watches a few real steps, then predicts from the actions alone. The first steps should match closely, later ones may drift.">
        {Object.entries(detail.imagination.keys).map(([key, entry]) => (
          <p>{key}: mean error {short(entry.error_mean)}, against {short(entry.baseline_mean)} for a forecast that nothing changes;
            the model is the better one at {short(entry.steps_better)} of {short(detail.imagination.horizon)} steps.</p>
        ))}
        {has("imagination") ? <Pictures detail={detail} folder="imagination" />
          : <p class="quiet">No pictures yet. They are drawn at the end of the run, or now with <code>rl-lab imagine {detail.path}</code>.</p>}
        {detail.row.can_dream && <p><a class="button" href={link("dream", { id: detail.id })}>Play in it yourself</a></p>}
      </Card>
      {has("planning") && <Card title="What the planner considered"
        text={expected_mean === null ? undefined : `On average a plan promised ${short(expected_mean)}, and ${short(received_mean)} came.`}>
        <Pictures detail={detail} folder="planning" />
      </Card>}
    </>
  );
}

type Differences = { experiment?: string; differences?: { key: string; default: string; value: string }[]; error?: string };

function Configuration({ detail }: { detail: Detail }) {
  const [found, setFound] = useState<Differences | null>(null);
  useEffect(() => {
    get<Differences>("/api/differences", { run: detail.id }).then(setFound, (error) => setFound({ error: error.message }));
  }, [detail.id]);
  return (
    <>
      <Card title="What differs from the experiment's defaults">
        {!found ? <p class="quiet">Composing the defaults…</p>
          : found.error ? <Notice text={found.error} kind="warn" />
          : !found.differences!.length ? <p class="quiet">Nothing: the run has the defaults of {found.experiment}.</p>
          : <div class="scroll"><table><thead><tr><th>setting</th><th>default of {found.experiment}</th><th>this run</th></tr></thead>
              <tbody>{found.differences!.map((entry) => <tr><td><code>{entry.key}</code></td><td>{entry.default}</td><td><b>{entry.value}</b></td></tr>)}</tbody></table></div>}
      </Card>
      <Card title="config.yaml" text="Enough to repeat the run."><pre>{detail.config || "not written yet"}</pre></Card>
    </>
  );
}

function Events({ detail }: { detail: Detail }) {
  return (
    <>
      <Card title="The plan" text="What the run announced before its first step."><pre>{detail.plan || "not written yet"}</pre></Card>
      <Card title={`Events (${detail.events.length})`} text="Restarted environments, rollbacks, resumed runs and the like.">
        {detail.events.length ? <div class="scroll"><table><thead><tr><th>time</th><th class="n">env steps</th><th>kind</th><th>message</th></tr></thead>
          <tbody>{[...detail.events].reverse().map((event) => <tr><td>{event.time}</td><td class="n">{event.env_steps}</td><td>{event.kind}</td><td>{event.message}</td></tr>)}</tbody></table></div>
          : <p class="quiet">Nothing out of the ordinary.</p>}
      </Card>
    </>
  );
}

type Gauges = {
  cpu_percent: number; memory_used: number; memory_total: number; disk_free: number; disk_total: number;
  process?: { pid: number; memory: number; cpu_percent: number; threads: number };
};

function System({ detail }: { detail: Detail }) {
  const [gauges, setGauges] = useState<Gauges | null>(null);
  usePolling(async () => setGauges(await get<Gauges>("/api/gauges", { run: detail.id })), 2, [detail.id]);
  const facts = Object.entries({ ...detail.info, "started with": detail.started_with, path: detail.path }).filter(([, value]) => value);
  return (
    <>
      <Card title="This machine now">
        {gauges ? <div class="gauges">
          <Gauge label="processor" share={gauges.cpu_percent / 100} text={`${Math.round(gauges.cpu_percent)} %`} />
          <Gauge label="memory" share={gauges.memory_used / gauges.memory_total} text={`${bytes(gauges.memory_used)} of ${bytes(gauges.memory_total)}`} />
          <Gauge label="disk" share={1 - gauges.disk_free / gauges.disk_total} text={`${bytes(gauges.disk_free)} free`} />
          {gauges.process && <Gauge label={`this run (process ${gauges.process.pid})`} share={gauges.process.memory / gauges.memory_total}
            text={`${bytes(gauges.process.memory)}, ${Math.round(gauges.process.cpu_percent)} % of a core, ${gauges.process.threads} threads`} />}
        </div> : <p class="quiet">Measuring…</p>}
      </Card>
      <Card title="Parameters by component"><Table rows={Object.entries(detail.parameters).map(([key, value]) => [key, whole(value)])} /></Card>
      {Object.keys(detail.summary).length > 0 && <Card title="Summary"><Table rows={Object.entries(detail.summary).map(([key, value]) => [key, short(value, 6)])} /></Card>}
      <Card title="The run"><Table rows={facts} /></Card>
      <Card title="Versions"><Table rows={Object.entries(detail.versions)} /></Card>
    </>
  );
}

const Table = ({ rows }: { rows: [string, string][] }) => (
  <div class="wide-scroll"><table><tbody>{rows.map(([key, value]) => <tr><td class="quiet">{key}</td><td class="break">{value}</td></tr>)}</tbody></table></div>
);

function Gauge({ label, share, text }: { label: string; share: number; text: string }) {
  return <div><span class="quiet small">{label}</span><meter min={0} max={1} high={0.9} value={share} aria-label={label} /><b>{text}</b></div>;
}
