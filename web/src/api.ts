// Requests to the server. Every one of them answers with JSON or with {error: "one line"}.

export type Row = {
  id: string; experiment: string; name: string; seed: number | string | null; status: string; error: string | null;
  workflow: string; environment: string; size: string | null; phase: string;
  env_steps: number | null; total_steps: number | null; updates: number | null; speed: number | null;
  eval_return: number | null; train_return: number | null; wall_s: number | null; left_s: number | null;
  start: string; device: string; parameters: number | null; can_dream: boolean;
};

export type Columns = { [name: string]: (number | null)[] } & { phase: string[] };
export type Curves = { epoch: number; start: number; count: number; columns: Columns; row: Row };

export type Media = { folder: string; name: string; env_steps: number | null; time: number };
export type Detail = {
  id: string; path: string; info: Record<string, string>; parameters: Record<string, number>;
  versions: Record<string, string>; started_with: string; summary: Record<string, number>; plan: string; config: string;
  events: Record<"time" | "env_steps" | "kind" | "message", string>[]; media: Media[];
  imagination: { horizon: number | null; keys: Record<string, Record<string, number | null>> };
  planning: { expected_mean: number | null; received_mean: number | null };
  commands: { name: string; command: string }[]; action_repeat: number; checkpoints: string[]; has_report: boolean; row: Row;
};
export type Glossary = {
  groups: { title: string; text: string; open: boolean; names: string[] }[]; sentences: Record<string, string>;
};

export class ServerError extends Error {}

async function answer<T>(response: Response): Promise<T> {
  let value: unknown;
  try {
    value = await response.json();
  } catch {
    throw new ServerError(response.ok ? "The server's answer cannot be read." : `The server answered ${response.status}.`);
  }
  if (!response.ok) throw new ServerError((value as { error?: string }).error ?? `The server answered ${response.status}.`);
  return value as T;
}

export async function get<T>(path: string, query: Record<string, string | number | string[]> = {}): Promise<T> {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (Array.isArray(value)) value.forEach((entry) => search.append(key, entry));
    else search.set(key, String(value));
  }
  return answer<T>(await fetch(`${path}?${search}`));
}

export async function post<T>(path: string, query: Record<string, string>, body?: unknown): Promise<T> {
  const headers: Record<string, string> = { "X-RL-Lab": "1", "Content-Type": "application/json" };
  return answer<T>(
    await fetch(`${path}?${new URLSearchParams(query)}`, { method: "POST", headers, body: JSON.stringify(body ?? null) }),
  );
}

export const mediaAddress = (run: string, file: Media) =>
  `/api/media?${new URLSearchParams({ run, path: `${file.folder}/${file.name}`, t: String(file.time) })}`;
