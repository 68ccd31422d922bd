// What a planner considered: over the dream as a tree or as paths, and beside it as a chart or a list.
import { useMemo } from "preact/hooks";
import { Chart, type Line } from "../chart";
import { short } from "../format";
import type { Hello, Plan, Tree } from "./store";

const LOOKS: Record<string, [string, number, number]> = { candidate: ["var(--quiet)", 1, 0.35], elite: ["var(--c2)", 1.3, 0.8], chosen: ["var(--c1)", 3, 1] };
const ORDER = ["candidate", "elite", "chosen"];
const [WIDTH, HEIGHT, EDGE] = [300, 200, 12]; // of what is drawn over a picture

/** The paths of a plan by what they show; `entry` where the plan has it, else the last, which is the most telling. */
export function drawnEntry(plan: Plan, entry: string): string {
  const keys = Object.keys(plan.paths);
  return keys.includes(entry) ? entry : keys.at(-1)!;
}

/** A path's name for people: the entry of the observation, or the reward so far. */
function pathName(name: string, names: string[]): string {
  return name === "reward so far" ? name : names[Number(name.split(" ").at(-1))] ?? name;
}

const actionName = (hello: Hello, action: number) => hello.legend.names[hello.legend.kind === "discrete" ? action : -1]?.toLowerCase() ?? `action ${action}`;

export function PlanFan({ plan, entry, change, hello }: { plan: Plan; entry: string; change: (name: string) => void; hello: Hello }) {
  const key = drawnEntry(plan, entry);
  const lines = useMemo(() => plan.paths[key].map((path, index) => ({ path, index }))
    .sort((a, b) => ORDER.indexOf(plan.kinds[a.index]) - ORDER.indexOf(plan.kinds[b.index]))
    .map(({ path, index }): Line => {
      const [tint, width, alpha] = LOOKS[plan.kinds[index]];
      return { label: plan.kinds[index], x: path.map((_, time) => time), y: path, colour: tint, width, alpha };
    }), [plan, key]);
  return (
    <section aria-label="Plan">
      <h2>What the planner considered</h2>
      <p class="quiet">{plan.planner} {plan.tree ? "searched a tree of futures" : `looked ${plan.horizon} steps ahead`} and expects {short(plan.expected)}.{" "}
        {plan.tree ? `Drawn: ${plan.tree.nodes.length - 1} steps that it tried. Thick: tried often, orange: the way it would go.` : <>Grey: candidates, green: the best of them, orange: the plan. Candidates were worth {short(plan.worst)} to {short(plan.best)}.</>}</p>
      {plan.tree ? <TreeList tree={plan.tree} hello={hello} /> : <>
        <label class="field"><span>drawn</span><select value={key} onChange={(event) => change(event.currentTarget.value)}>
          {Object.keys(plan.paths).map((name) => <option value={name}>{pathName(name, hello.names)}</option>)}</select></label>
        <Chart lines={lines} height={200} label="Plans" xLabel="steps ahead" />
      </>}
    </section>
  );
}

/** Over the dream: the search tree, or the paths of the candidates, from now at the left to the horizon at the right. */
export function PlanOverlay({ plan, entry, hello }: { plan: Plan; entry: string; hello: Hello }) {
  return (
    <svg class="overlay" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={plan.tree ? "The planner's search tree" : "The planner's candidates"}>
      {plan.tree ? <TreeDrawing tree={plan.tree} hello={hello} /> : <Paths plan={plan} entry={drawnEntry(plan, entry)} hello={hello} />}
    </svg>
  );
}

function Paths({ plan, entry, hello }: { plan: Plan; entry: string; hello: Hello }) {
  const paths = plan.paths[entry];
  const values = paths.flat();
  const [low, high] = [values.reduce((least, value) => Math.min(least, value), Infinity), values.reduce((most, value) => Math.max(most, value), -Infinity)];
  const x = (time: number) => EDGE + (time / Math.max(1, paths[0].length - 1)) * (WIDTH - 2 * EDGE);
  const y = (value: number) => HEIGHT - 26 - ((value - low) / (high - low || 1)) * (HEIGHT - 26 - EDGE);
  return (
    <>
      {ORDER.flatMap((kind) => paths.filter((_, index) => plan.kinds[index] === kind).map((path) => (
        <polyline class={kind} points={path.map((value, time) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`).join(" ")} />
      )))}
      <text x={EDGE} y={HEIGHT - 8}>{pathName(entry, hello.names)}, {plan.horizon} steps ahead</text>
    </>
  );
}

type Placed = { index: number; depth: number; y: number; on: boolean };

/** Nodes by depth from left to right, children below each other; `on`: on the way of the most visits. */
export function placed(tree: Tree): Map<number, Placed> {
  const children = tree.nodes.map((): number[] => []);
  tree.nodes.forEach((node, index) => node.parent !== null && children[node.parent].push(index));
  children.forEach((own) => own.sort((a, b) => tree.nodes[a].action - tree.nodes[b].action));
  const found = new Map<number, Placed>();
  let leaves = 0;
  const place = (index: number, depth: number, on: boolean): number => {
    const own = children[index];
    const best = own.reduce((most, child) => (most < 0 || tree.nodes[child].visits > tree.nodes[most].visits ? child : most), -1);
    const heights = own.map((child) => place(child, depth + 1, on && child === best));
    const y = heights.length ? (heights[0] + heights.at(-1)!) / 2 : leaves++;
    found.set(index, { index, depth, y, on });
    return y;
  };
  place(0, 0, true);
  return found;
}

function TreeDrawing({ tree, hello }: { tree: Tree; hello: Hello }) {
  const places = useMemo(() => placed(tree), [tree]);
  const all = [...places.values()];
  const [deepest, lowest] = [Math.max(1, ...all.map((node) => node.depth)), Math.max(1, ...all.map((node) => node.y))];
  const x = (node: Placed) => EDGE + (node.depth / deepest) * (WIDTH - 2 * EDGE);
  const y = (node: Placed) => EDGE + (node.y / lowest) * (HEIGHT - 2 * EDGE);
  const most = Math.max(1, ...tree.nodes.slice(1).map((node) => node.visits));
  return (
    <>
      {all.filter((node) => node.index > 0).map((node) => {
        const { parent, visits, action, value } = tree.nodes[node.index];
        const from = places.get(parent!)!;
        return <line class={node.on ? "chosen" : "candidate"} x1={x(from)} y1={y(from)} x2={x(node)} y2={y(node)} style={{ strokeWidth: 0.6 + 5 * Math.sqrt(visits / most) }}>
          <title>{actionName(hello, action)}: {visits} visits, value {short(value)}</title></line>;
      })}
      {all.filter((node) => node.depth === 1 && tree.nodes[node.index].visits > most / 50).map((node) => (
        <text x={x(node) + 4} y={Math.max(10, y(node) - 3)}>{actionName(hello, tree.nodes[node.index].action)} {tree.nodes[node.index].visits}</text>
      ))}
    </>
  );
}

/** The most visited children, level by level. */
function TreeList({ tree, hello }: { tree: Tree; hello: Hello }) {
  const below = (parent: number) => tree.nodes.map((node, index) => ({ ...node, index })).filter((node) => node.parent === parent).sort((a, b) => b.visits - a.visits).slice(0, 6);
  const show = (parent: number, depth: number) => depth < 4 && (
    <ul class="tree">{below(parent).map((node) => <li>{actionName(hello, node.action)} <b>{node.visits}</b> visits, value {short(node.value)}{show(node.index, depth + 1)}</li>)}</ul>
  );
  return <div class="scroll">{show(0, 0)}</div>;
}
