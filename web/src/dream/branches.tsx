// The tree of branches: one lane each, from where it left another to where it ended, with its return.
import { short } from "../format";
import type { DreamStore, Moment } from "./store";

type Lane = { leaf: Moment; from: number; lane: number; parentLane: number | null; real: number; dreamed: number };

export function lanes(store: DreamStore): Lane[] {
  const parents = new Set([...store.moments.values()].map((moment) => moment.parent));
  const leaves = [...store.moments.values()].filter((moment) => !parents.has(moment.id));
  const owner = new Map<number, number>(); // which lane a moment belongs to
  return leaves.map((leaf, lane) => {
    const path = store.path(leaf);
    const shared = path.findLastIndex((moment) => owner.has(moment.id));
    path.slice(shared + 1).forEach((moment) => owner.set(moment.id, lane));
    const real = path.reduce((sum, moment) => sum + (moment.time ? moment.real?.reward ?? 0 : 0), 0);
    const dreamed = path.reduce((sum, moment) => sum + (moment.dream_reward ?? (moment.time ? moment.real?.reward ?? 0 : 0)), 0);
    return { leaf, lane, from: shared < 0 ? 0 : path[shared].time, parentLane: shared < 0 ? null : owner.get(path[shared].id)!, real, dreamed };
  });
}

const LANES = { wide: 560, narrow: 200 }; // length of a lane; the returns stand beside it
const BESIDE = 200;

export function Branches({ store, pick }: { store: DreamStore; pick: (moment: Moment) => void }) {
  const all = lanes(store);
  const end = Math.max(1, ...all.map((lane) => lane.leaf.time));
  const current = store.current;
  const path = new Set(store.path(current).map((moment) => moment.id));
  const length = innerWidth > 760 ? LANES.wide : LANES.narrow;
  const x = (time: number) => 8 + (time / end) * length;
  const y = (lane: number) => 14 + lane * 22;
  const choose = (lane: Lane, event: MouseEvent) => {
    const svg = (event.currentTarget as SVGElement).ownerSVGElement!;
    const box = svg.getBoundingClientRect();
    const time = Math.round((((event.clientX - box.left) / box.width) * (length + BESIDE) - 8) / length * end);
    const own = store.path(lane.leaf);
    pick(own[Math.max(lane.from, Math.min(time, lane.leaf.time))]);
  };
  return (
    <section aria-label="Branches">
      <h2>Branches <span class="quiet">({all.length})</span></h2>
      <p class="quiet">Click a moment here or on the timeline and act: the other branch stays as it was.</p>
      <div class="scroll"><svg class="branches" viewBox={`0 0 ${length + BESIDE} ${y(all.length)}`} role="img" aria-label={`${all.length} branches`}>
        {all.map((lane) => (
          <g class={path.has(lane.leaf.id) ? "on" : ""}>
            {lane.parentLane !== null && <path d={`M${x(lane.from)},${y(lane.parentLane)} V${y(lane.lane)}`} />}
            <line x1={x(lane.from)} y1={y(lane.lane)} x2={x(lane.leaf.time)} y2={y(lane.lane)} onClick={(event) => choose(lane, event)} tabIndex={0} role="button"
              aria-label={`Branch ${lane.lane + 1}, step ${lane.from} to ${lane.leaf.time}`} onKeyDown={(event) => event.key === "Enter" && pick(lane.leaf)} />
            <text x={length + 18} y={y(lane.lane) + 4}>game {short(lane.real)} · dream {short(lane.dreamed)}</text>
          </g>
        ))}
        {current && <circle cx={x(current.time)} cy={y(all.find((lane) => store.path(lane.leaf).includes(current))?.lane ?? 0)} r={5} />}
      </svg></div>
    </section>
  );
}
