// Package lifecycle decides about pods. All decisions are pure functions of a pod's state and the
// time.
//
// Step compares the desired state (Desired) with the actual state (Observed) at a given time and
// returns the next actions. Status computes the pod's status from the same inputs. Neither keeps
// state. Package pod observes, calls Step and performs the actions.
//
//	            ┌────── volumes ──────┐
//	received ──▶├─ sandbox + network ─┤──▶ init 1 ──▶ … ──▶ sidecars ──▶ containers ──▶ …
//	            └────── images ───────┘  (in order; a sidecar only    (in parallel, with
//	                                     has to start)                hooks and probes)
//
//	sandbox lost ──▶ stop its containers ──▶ sandbox, next attempt ──▶ init 1 …
//	container ended ──▶ restart by policy, with back-off ──▶ or done
//	all done, or deadline ──▶ stop sidecars ──▶ stop sandbox ──▶ volumes
//	                          (runtime records stay until deletion)
//	deleted ──▶ stop gate ──▶ preStop ──▶ containers ──▶ sidecars ──▶ sandbox ──▶ volumes ──▶ gone
//
// Invariants:
//   - At most one instance of a container runs at any time.
//   - Teardown is safe at any step, on a partly created pod, and any number of times.
//   - Everything that Step needs after a restart of the agent is in the runtime
//     (labels and annotations) or in the pod object, or can be observed again without harm.
package lifecycle
