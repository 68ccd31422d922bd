// Debiased exponential smoothing, as experiment trackers draw it; weight 0 leaves a curve as it is.
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  let mean = 0;
  let trust = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    trust = weight * trust + (1 - weight);
    return mean / trust;
  });
}
