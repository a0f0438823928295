// Package pod runs pods: one worker per pod, never two for one pod.
//
// The decisions are pure functions. Step compares the desired state (Desired) with the actual state
// (Observed) at a given time and returns the next actions. Status computes the pod's status from
// the same inputs. Neither keeps state. A worker observes, calls Step, performs the actions in
// separate goroutines, and repeats this whenever something changes. Recovery after a crash is
// therefore not a special case: it is observe and Step again.
//
//	            ┌────────── volumes ──────────┐
//	received ──▶├────────── sandbox + network ┤──▶ init 1 ──▶ … ──▶ sidecars ──▶ containers ──▶ hooks ──▶ probes ──▶ Ready
//	            └────────── images ───────────┘        (in order; a sidecar has to start only)   (in parallel)
//
//	sandbox lost ──▶ stop what is left of it ──▶ sandbox + 1 ──▶ init 1 …
//	container ended ──▶ restart by policy, after a growing delay ──▶ or done
//	all done, or deadline ──▶ stop sidecars ──▶ stop sandbox ──▶ volumes        (records stay until deletion)
//	deleted ──▶ stop gate ──▶ preStop ──▶ containers ──▶ sidecars ──▶ sandbox ──▶ volumes ──▶ gone
//
// Invariants:
//   - At most one instance of a container runs at any time.
//   - Teardown is safe at any step, on a partly created pod, and any number of times.
//   - Everything that Step needs after a restart of the agent is in the runtime
//     (labels and annotations) or in the pod object, or can be observed again without harm.
package pod
