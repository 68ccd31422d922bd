// Several runs or groups: curves with intervals over seeds, scores, settings that differ. The address holds it all.
import { useEffect, useMemo, useState } from "preact/hooks";
import { get, type Row } from "./api";
import { Chart, type Line } from "./chart";
import { AXES } from "./curves";
import { duration, short, whole } from "./format";
import { link, useQuery, type Route } from "./route";
import { smooth } from "./smooth";
import { Card, Choice, Copy, Notice, Slider } from "./widgets";

type Scored = {
  id: string; name: string; seed: number | string; status: string; return_mean: number | null; return_std: number | null;
  is_final: boolean; env_steps: number; wall_s: number; x: number[]; y: number[];
};
type Group = {
  label: string; iqm: number | null; ci95: [number, number] | null; runs: Scored[];
  middle: { x: number[]; y: number[]; low?: number[]; high?: number[] } | null;
};
type Comparison = { metric: string; metrics: string[]; groups: Group[]; differences: { key: string; values: string[] }[] };

export function Compare({ route, rows }: { route: Route; rows: Map<string, Row> }) {
  const ids = route.query.getAll("run");
  const [metric, setMetric] = useQuery(route, "metric", "eval/return_mean");
  const [axis, setAxis] = useQuery(route, "x", "env_steps");
  const [weight, setWeight] = useQuery(route, "smooth", "0");
  const [single, setSingle] = useQuery(route, "single", "1");
  const [log, setLog] = useQuery(route, "log", "");
  const [found, setFound] = useState<Comparison | null>(null);
  const [trouble, setTrouble] = useState<string | null>(null);
  const stamp = ids.map((id) => rows.get(id)?.env_steps ?? "").join();

  useEffect(() => {
    if (!ids.length) return;
    get<Comparison>("/api/compare", { run: ids, metric, x: axis })
      .then((answer) => (setFound(answer), setTrouble(null)), (error) => setTrouble(error.message));
  }, [ids.join(), metric, axis, stamp]);
  const lines = useMemo(() => (found ? curves(found.groups, Number(weight), !!single) : []), [found, weight, single]);

  if (!ids.length) return <Picker rows={rows} />;
  const options = [...new Set(["eval/return_mean", metric, ...(found?.metrics ?? [])])].map((name) => [name, name] as const);
  const chosen = AXES.find(([key]) => key === axis)?.[1] ?? axis;
  return (
    <main>
      <header>
        <h1>Comparison of {ids.length} run{ids.length === 1 ? "" : "s"}</h1>
        <p class="quiet">Runs that differ in their seed only are one group. <Copy text={location.href} label="copy the link to this view" /></p>
      </header>
      <Notice text={trouble} />
      <Card title="Curves" text="Thick: the interquartile mean of a group (without the best and the worst quarter), with its bootstrap 95 % interval. Thin: single runs. Minutes count from where a run came to speed.">
        <div class="toolbar">
          <Choice label="metric" value={metric} options={options} change={setMetric} />
          <Choice label="over" value={axis as "env_steps"} options={AXES} change={setAxis} />
          <Slider label="smoothing" value={Number(weight)} min={0} max={0.98} step={0.02} change={(value) => setWeight(String(value))} />
          <label class="field inline"><input type="checkbox" checked={!!single} onChange={() => setSingle(single ? "" : "1")} /> single runs</label>
          <label class="field inline"><input type="checkbox" checked={!!log} onChange={() => setLog(log ? "" : "1")} /> logarithmic axis</label>
        </div>
        {lines.length ? <Chart lines={lines} height={340} label={metric} xLabel={chosen} legend log={!!log} />
          : <p class="quiet">{found ? "No run has logged this metric." : "Reading the runs…"}</p>}
      </Card>
      {found && <Scores groups={found.groups} route={route} />}
      {found && <Card title={`Settings that differ (${found.differences.length})`}>
        {found.differences.length ? <div class="scroll"><table>
          <thead><tr><th>setting</th>{found.groups.map((group) => <th>{group.label}</th>)}</tr></thead>
          <tbody>{found.differences.map((entry) => <tr><td><code>{entry.key}</code></td>{entry.values.map((value) => <td>{value}</td>)}</tr>)}</tbody>
        </table></div> : <p class="quiet">None, apart from seeds and places.</p>}
      </Card>}
    </main>
  );
}

function curves(groups: Group[], weight: number, single: boolean): Line[] {
  return groups.flatMap((group, index) => {
    const tint = `var(--c${index % 8})`;
    const several = group.middle !== null;
    const own: Line[] = single || !several ? group.runs.filter((run) => run.x.length).map((run) => ({
      label: several ? `seed ${run.seed}` : group.label, x: run.x, y: smooth(run.y, weight), colour: tint,
      width: several ? 1.2 : 2.2, alpha: several ? 0.7 : 1, dots: run.x.length < 2,
    })) : [];
    if (group.middle) {
      own.push({ label: `${group.label}: IQM of ${group.runs.length}`, colour: tint, width: 2.6, x: group.middle.x,
        y: smooth(group.middle.y, weight), low: group.middle.low, high: group.middle.high });
    }
    return own;
  });
}

function Scores({ groups, route }: { groups: Group[]; route: Route }) {
  const without = (id: string) => {
    const query = new URLSearchParams(route.query);
    query.delete("run", id);
    return `#/compare?${query}`;
  };
  return (
    <Card title="Scores" text="A group's return is the interquartile mean of its runs with the stratified bootstrap 95 % interval; a run's is the mean over its final evaluation episodes. An asterisk marks a run without one: its last evaluation so far.">
      <div class="scroll"><table>
        <thead><tr><th></th><th class="n">seed</th><th class="n">return</th><th class="n">± std</th><th class="n">env steps</th><th class="n">wall time</th><th></th></tr></thead>
        <tbody>{groups.flatMap((group) => [
          <tr class="group"><td><b>{group.label}</b></td><td class="n">{group.runs.length} run{group.runs.length === 1 ? "" : "s"}</td>
            <td class="n"><b>{short(group.iqm)}</b>{group.ci95 && ` [${short(group.ci95[0])}, ${short(group.ci95[1])}]`}</td><td colSpan={4}></td></tr>,
          ...group.runs.map((run) => <tr>
            <td><a href={link("run", { id: run.id })}>{run.name}</a></td><td class="n">{run.seed}</td>
            <td class="n">{short(run.return_mean)}{run.is_final || run.return_mean === null ? "" : "*"}</td><td class="n">{short(run.return_std)}</td>
            <td class="n">{whole(run.env_steps)}</td><td class="n">{duration(run.wall_s)}</td>
            <td class="n"><a class="plain" href={without(run.id)} aria-label={`Leave out ${run.name}`}>leave out</a></td></tr>),
        ])}</tbody>
      </table></div>
    </Card>
  );
}

function Picker({ rows }: { rows: Map<string, Row> }) {
  const groups = new Map<string, string[]>();
  for (const row of rows.values()) groups.set(row.experiment, [...(groups.get(row.experiment) ?? []), row.id]);
  return (
    <section class="narrow-page">
      <h1>Compare runs</h1>
      <p>Select runs in the <a href={link("runs")}>table</a> (<kbd>x</kbd>) and press <kbd>c</kbd>, or take all runs of an experiment:</p>
      <ul>{[...groups].map(([name, ids]) => <li><a href={link("compare", { run: ids.slice(0, 40) })}>{name}</a> <span class="quiet">{ids.length} run{ids.length === 1 ? "" : "s"}</span></li>)}</ul>
    </section>
  );
}
