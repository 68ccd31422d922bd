// What the page knows of a dream, kept up to date by the server's messages over one WebSocket.

export type Moment = {
  id: number; parent: number | null; time: number; since: number; driver: string; action: number[] | null;
  real: { reward: number | null; ended: boolean; terminal: boolean } | null;
  dream_reward: number | null; continuation: number | null; value: number | null; surprise: number | null;
  error: number | null; baseline: number | null; seen: number[] | null; dreamed: number[];
};
export type Legend = { kind: "discrete" | "continuous"; classes: number[]; names: string[]; idle: number[] | null };
export type Hello = {
  environment: string; legend: Legend; names: string[]; draws: boolean; planners: string[];
  model: {
    workflow: string; checkpoint: string; decodes: boolean; has_value: boolean; has_policy: boolean; has_planner: boolean;
    has_temperature: boolean; has_surprise: boolean; members: number;
  };
};
export type State = {
  playing: boolean; current: number; fps: number; idle: string; world: "game" | "both" | "dream";
  driver: "you" | "agent" | "planner" | "recorded"; planner: string; horizon: number; plan: boolean; temperature: number;
  member: number | null; seed: number; episode: number; context: number; from_record: boolean; checkpoint: string;
  checkpoints: string[]; follows: boolean;
};
export type Plan = {
  moment: number; planner: string; horizon: number; expected: number; best: number | null; worst: number | null;
  kinds: string[]; paths: Record<string, number[][]>; first_actions: number[][]; tree?: Tree;
};
export type Tree = { nodes: { parent: number | null; action: number; visits: number; value: number }[] };
type Description = { kind: "rgb" | "jpeg"; width: number; height: number; size: number };
export type Picture = ImageBitmap;
type Header = { type: string; pictures?: Record<string, Description>; input?: number } & Record<string, unknown>;

const RETRY = 1500; // milliseconds
const KEPT = 300; // pictures that the page holds

export class DreamStore {
  hello: Hello | null = null;
  state: State | null = null;
  moments = new Map<number, Moment>();
  pictures = new Map<number, Record<string, Picture>>();
  plan: Plan | null = null;
  ghost: Picture | null = null;
  episodes: string[] | null = null;
  recorded: { folder: string; file: string; records: number; return: number; command: string } | null = null;
  trouble: string | null = null;
  ended = false;
  fps = 0;
  latency: number | null = null;
  children = new Map<number, number>(); // branch points: how many moments follow one
  private socket: WebSocket | null = null;
  private pressed = new Map<number, number>();
  private inputs = 0;
  private arrivals: number[] = [];
  private delays: number[] = [];
  private listeners = new Set<() => void>();
  private painters = new Set<() => void>();
  private waiting = false;

  constructor(readonly run: string) {
    this.connect();
  }

  private connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/api/dream?${new URLSearchParams({ run: this.run })}`);
    socket.binaryType = "arraybuffer";
    socket.onmessage = (event) => void this.receive(event.data);
    socket.onclose = () => {
      if (this.ended || this.socket !== socket) return;
      this.trouble = "The connection to the server is lost; trying again…";
      this.changed();
      setTimeout(() => !this.ended && this.connect(), RETRY);
    };
    this.socket = socket;
  }

  close() {
    this.ended = true;
    this.socket?.close();
  }

  send(command: Record<string, unknown>) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(command));
  }

  /** Tell which action is held now. The frame that answers it says so, and the time until then is measured. */
  input(action: number[] | null) {
    const id = ++this.inputs;
    if (action) this.pressed.set(id, performance.now());
    this.send({ type: "input", action, id });
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  /** Called at once whenever there is something new to paint. */
  onPaint(painter: () => void): () => void {
    this.painters.add(painter);
    return () => void this.painters.delete(painter);
  }

  get current(): Moment | null {
    return this.state ? this.moments.get(this.state.current) ?? null : null;
  }

  /** The moments from the start to one of them. */
  path(moment: Moment | null): Moment[] {
    const found: Moment[] = [];
    for (let at = moment; at; at = at.parent === null ? null : this.moments.get(at.parent) ?? null) found.push(at);
    return found.reverse();
  }

  private async receive(data: string | ArrayBuffer) {
    const [header, blobs] = typeof data === "string" ? [JSON.parse(data) as Header, []] : split(data);
    const pictures = blobs.length ? await decoded(blobs) : {};
    switch (header.type) {
      case "hello":
        this.hello = header as unknown as Hello;
        this.trouble = null;
        break;
      case "state":
        this.state = header as unknown as State;
        if (this.plan && this.plan.moment !== this.state.current && !this.state.plan) this.clearPlan();
        break;
      case "tape": {
        if (header.first === 0) this.clear();
        for (const moment of header.moments as Moment[]) this.add(moment);
        break;
      }
      case "cleared":
        this.clear();
        break;
      case "moment":
      case "update":
      case "frame":
        if (header.type !== "update" && !this.ended) this.trouble = null; // it was about what was asked before
        this.add(header as unknown as Moment);
        this.arrive(header, pictures);
        break;
      case "plan":
        this.plan = header as unknown as Plan;
        this.ghost = pictures.ghost ?? null;
        break;
      case "episodes":
        this.episodes = header.labels as string[];
        break;
      case "recorded":
        this.recorded = header as unknown as DreamStore["recorded"];
        break;
      case "trouble":
        this.trouble = String(header.text);
        break;
      case "fatal":
        this.trouble = String(header.text);
        this.ended = true;
        break;
    }
    this.painters.forEach((painter) => painter());
    this.changed();
  }

  private arrive(header: Header, pictures: Record<string, Picture>) {
    const id = Number(header.id);
    if (Object.keys(pictures).length) {
      this.pictures.delete(id);
      this.pictures.set(id, pictures);
      if (this.pictures.size > KEPT) this.pictures.delete(this.pictures.keys().next().value!);
    }
    if (this.state) this.state = { ...this.state, current: id };
    const now = performance.now();
    if (header.type === "moment") {
      this.arrivals = [...this.arrivals.filter((time) => now - time < 1000), now];
      this.fps = this.arrivals.length > 1 ? ((this.arrivals.length - 1) * 1000) / (now - this.arrivals[0]) : 0;
    }
    const pressed = header.input === undefined ? undefined : this.pressed.get(header.input);
    if (pressed !== undefined) {
      this.pressed.clear();
      requestAnimationFrame(() => {
        this.delays = [...this.delays.slice(-19), performance.now() - pressed];
        const sorted = [...this.delays].sort((a, b) => a - b);
        this.latency = sorted[Math.floor(sorted.length / 2)];
        this.changed();
      });
    }
  }

  private add(moment: Moment) {
    if (!this.moments.has(moment.id) && moment.parent !== null) {
      this.children.set(moment.parent, (this.children.get(moment.parent) ?? 0) + 1);
    }
    this.moments.set(moment.id, moment);
  }

  private clear() {
    this.moments.clear();
    this.pictures.clear();
    this.children.clear();
    this.clearPlan();
  }

  private clearPlan() {
    this.plan = this.ghost = null;
  }

  /** Charts and controls follow at a calmer rate than the pictures. */
  private changed() {
    if (this.waiting) return;
    this.waiting = true;
    setTimeout(() => {
      this.waiting = false;
      this.listeners.forEach((listener) => listener());
    }, this.state?.playing ? 120 : 16);
  }
}

function split(data: ArrayBuffer): [Header, { name: string; description: Description; bytes: Uint8Array }[]] {
  const length = new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as Header;
  let offset = 4 + length;
  const blobs = Object.entries(header.pictures ?? {}).map(([name, description]) => {
    const bytes = new Uint8Array(data, offset, description.size);
    offset += description.size;
    return { name, description, bytes };
  });
  return [header, blobs];
}

async function decoded(blobs: ReturnType<typeof split>[1]): Promise<Record<string, Picture>> {
  const bitmaps = await Promise.all(blobs.map(({ description, bytes }) => {
    if (description.kind === "jpeg") return createImageBitmap(new Blob([bytes as BlobPart], { type: "image/jpeg" }));
    const image = new ImageData(description.width, description.height);
    for (let from = 0, to = 0; from < bytes.length; from += 3, to += 4) {
      image.data[to] = bytes[from];
      image.data[to + 1] = bytes[from + 1];
      image.data[to + 2] = bytes[from + 2];
      image.data[to + 3] = 255;
    }
    return createImageBitmap(image);
  }));
  return Object.fromEntries(blobs.map(({ name }, index) => [name, bitmaps[index]]));
}
