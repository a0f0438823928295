// Package pod runs pods: one worker per pod, never two for one pod.
//
// The decisions are pure functions in package lifecycle. A worker observes, calls lifecycle.Step,
// performs the actions in separate goroutines, and repeats this whenever something changes.
// Recovery after a crash is therefore not a special case: it is observe and Step again.
//
//	Set ──▶ worker ──▶ observe (runtime) ──▶ lifecycle.Step ──▶ actions ──▶ observe …
//	                        └───────────────▶ lifecycle.Status ──▶ Reporter
//
// The Set has one worker per pod of the node. It admits pods (package admission), grants resizes,
// evicts pods and removes what belongs to no pod. The packages below pod each have one subject:
// lifecycle (decisions), admission (checks of the node), criconfig (CRI configurations), podfiles
// (records and logs on disk), podevents, diskusage and subpath.
package pod
