package linear

import (
	"fmt"
	"sort"
	"strings"
)

// Kind is the kind of a Violation.
type Kind string

// The kinds of violations that Recorder.Check detects.
const (
	// the read misses a change that was acknowledged before the read started
	StaleRead Kind = "stale read"
	// the read returned another state than the history has at that revision
	WrongRead Kind = "read of what was never so"
	TornList  Kind = "list is no snapshot" // the list contains items of different revisions
	// a commit was acknowledged, but is not in the history at its revision
	LostWrite   Kind = "lost write"
	Doubled     Kind = "applied twice"          // a commit is in the history more than once
	Resurrected Kind = "refused and applied"    // a commit was reported as not applied, but is in the history
	Torn        Kind = "commit applied in part" // the effect of a commit differs from its ops
	// a commit was applied although its precondition did not hold, or refused although it held
	Broken      Kind = "precondition broken"
	Foreign     Kind = "change that nobody made"    // a revision is neither a recorded commit nor an expiry
	WentBack    Kind = "revision went back"         // successive commits or reads return decreasing revisions
	WatchGap    Kind = "watch misses a revision"    // a watch skipped a revision with events for its prefix
	WatchRepeat Kind = "watch repeats or goes back" // a watch delivered a revision twice, or an earlier one
	// two watches deliver the same revision differently, or one delivers an impossible state
	WatchDiffer Kind = "watches differ"
	WatchStuck  Kind = "watch does not reach the end" // a follower did not receive the last commit
	Unfenced    Kind = "fence ignored"                // a commit with an older fence follows one with a newer fence
	// a key expired too early or not at all, or has a wrong expiry time
	Expiry  Kind = "expiry too early or never"
	Untyped Kind = "error that the contract lacks" // a call returned an error that raftstore.Store does not define
	// no sequential order of the calls explains the values that were read (porcupine)
	Linear    Kind = "no order explains it"
	Undecided Kind = "checker gave up" // the search for an order exceeded its timeout
)

// Violation is one violation of the contract of raftstore.Store, with a description.
type Violation struct {
	Kind Kind
	What string
}

// Report is the result of Recorder.Check: counts of the recorded calls and the violations that were
// found.
type Report struct {
	// Numbers of recorded calls: all calls, acknowledged calls, calls with a failed precondition,
	// calls that certainly had no effect, and calls with an unknown effect.
	Ops, Acknowledged, Refused, Failed, Unknown int

	Revisions  int // number of revisions in the history
	Deliveries int // number of deliveries to watchers
	Sessions   int // number of watches, each from a given revision
	Fenced     int // number of commits that were acknowledged with a fence
	Expired    int // number of expired keys

	Failures   map[string]int // number of failed calls by error
	Violations []Violation
	more       map[Kind]int // number of violations that are counted but not described
}

// perKind is how many violations of each kind are described in a report. Further violations are
// only counted.
const perKind = 5

func (r *Report) addViolation(k Kind, format string, args ...any) {
	n := 0
	for _, v := range r.Violations {
		if v.Kind == k {
			n++
		}
	}
	if n < perKind {
		r.Violations = append(r.Violations, Violation{k, fmt.Sprintf(format, args...)})
		return
	}
	if r.more == nil {
		r.more = make(map[Kind]int)
	}
	r.more[k]++
}

// Has reports whether a violation of the kind was found.
func (r *Report) Has(k Kind) bool {
	for _, v := range r.Violations {
		if v.Kind == k {
			return true
		}
	}
	return false
}

// Err returns an error that lists the violations, or nil if the report has no violations.
func (r *Report) Err() error {
	if len(r.Violations) == 0 {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "the store violated its contract:")
	for _, v := range r.Violations {
		fmt.Fprintf(&b, "\n  %s: %s", v.Kind, v.What)
	}
	kinds := make([]string, 0, len(r.more))
	for k, n := range r.more {
		kinds = append(kinds, fmt.Sprintf("\n  %s: %d more", k, n))
	}
	sort.Strings(kinds)
	return fmt.Errorf("%s%s", b.String(), strings.Join(kinds, ""))
}

// String returns a summary: the numbers of calls by effect, revisions, watches and failures by
// error.
func (r *Report) String() string {
	var why []string
	for what, n := range r.Failures {
		why = append(why, fmt.Sprintf("%d %s", n, strings.TrimPrefix(what, "raftstore: ")))
	}
	sort.Strings(why)
	return fmt.Sprintf("%d calls (%d done, %d refused, %d failed, %d of unknown outcome), %d revisions, %d fenced, %d "+
		"keys expired, %d watches with %d deliveries; failed were: %s",
		r.Ops, r.Acknowledged, r.Refused, r.Failed, r.Unknown, r.Revisions, r.Fenced, r.Expired, r.Sessions,
		r.Deliveries, strings.Join(why, ", "))
}
