// Package pod runs pods: one worker per pod, never two for one pod.
//
// The thinking is pure. Step looks at what should be (Desired), at what is
// (Observed) and at the clock, and says what to do next; Status turns the same
// two into the pod's status. Neither remembers anything. A worker observes, asks
// Step, performs the actions in goroutines of their own and starts over whenever
// something changed. Recovery after a crash is therefore no case of its own:
// observe and Step again.
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
// What must stay true:
//   - at most one instance of a container runs at any time;
//   - teardown is safe at any step, with anything half made, and any number of times;
//   - everything that Step needs after a restart of the agent is in the runtime
//     (labels and annotations), in the pod object, or can be found out again at no harm.
package pod
