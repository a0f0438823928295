// Package rotation says how a key that all replicas share gives way to a new one while they serve. It is pure: what is
// recorded and what the replicas have goes in, the next record and who is waited for comes out. So whoever leads goes on
// where the one before stopped: there is nothing to know but the record, which lies in the store, and what the replicas
// say of themselves.
//
//	trust ─▶ use ─▶ wait ─▶ forget ─▶ done
//	  └────▶ aborted
//
//	trust    every replica takes the new key and believes it beside the former one
//	use      every replica signs, or seals, with the new key
//	wait     the former one is believed on, for what was signed by it
//	forget   every replica gives up the former one
//
// A step begins when every member has said that it has done the one before: nobody meets a signature that it does not
// believe. Each step can be done again.
package rotation

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Kind is what is exchanged.
type Kind string

// What can be exchanged.
const (
	PeersCA           Kind = "peers-ca"            // the authority of the connections between replicas
	ServiceAccountKey Kind = "service-account-key" // signs the tokens of service accounts
	EncryptionKey     Kind = "encryption-key"      // under which each replica seals its disk
)

// Kinds are all of them.
func Kinds() []Kind { return []Kind{PeersCA, ServiceAccountKey, EncryptionKey} }

// ParseKind names what there is when it is none of it.
func ParseKind(s string) (Kind, error) {
	if slices.Contains(Kinds(), Kind(s)) {
		return Kind(s), nil
	}
	var names []string
	for _, k := range Kinds() {
		names = append(names, string(k))
	}
	return "", fmt.Errorf("kind %q: want one of %s", s, strings.Join(names, ", "))
}

// Step is how far an exchange has come.
type Step string

// The steps, in order; Aborted comes after Trust only.
const (
	Trust   Step = "trust"
	Use     Step = "use"
	Wait    Step = "wait"
	Forget  Step = "forget"
	Done    Step = "done"
	Aborted Step = "aborted"
)

// Version of a Record. Later releases may add fields, which are ignored; a later version is not touched.
const Version = 1

// Record is an exchange as it lies in the store. Times are in milliseconds since 1970.
type Record struct {
	Version int    `json:"version"`
	ID      string `json:"id"` // of this exchange
	Kind    Kind   `json:"kind"`
	New     string `json:"new"` // ids of the keys
	Old     string `json:"old"`
	Step    Step   `json:"step"`
	// Sealed is the new key, which replicas alone can open; gone once all of them sign with it.
	Sealed  []byte `json:"sealed,omitempty"`
	By      string `json:"by,omitempty"` // who asked for it
	Started int64  `json:"startedUnixMs"`
	Since   int64  `json:"sinceUnixMs"`           // the step
	Keep    int64  `json:"keepSeconds,omitempty"` // how long the former key is believed after the new one signs
	Until   int64  `json:"untilUnixMs,omitempty"` // that is until then; known in the step wait
	// Force: neither replicas that do not answer nor what was signed by the former key is waited for.
	Force bool `json:"force,omitempty"`
}

// Active says whether there is something left to do.
func (r Record) Active() bool { return r.Step != "" && r.Step != Done && r.Step != Aborted }

// Held is what a replica says it has of one kind. Ids of keys.
type Held struct {
	Signs    string
	Believes []string // Signs among them
}

// Member is a replica and what it has; Problem says why that is not known, or why it cannot take a key.
type Member struct {
	Name    string
	Problem string
	Held    Held
}

// Begin refuses an exchange that could not go on: somebody does not answer or cannot, or the replicas do not sign with
// one key. It returns the id of the key that they sign with.
func Begin(now Record, members []Member) (old string, err error) {
	if now.Active() {
		return "", fmt.Errorf("the exchange of %s is under way, at step %s: only one at a time", now.Kind, now.Step)
	}
	if len(members) == 0 {
		return "", fmt.Errorf("no member is known")
	}
	signs := map[string][]string{}
	var missing []string
	for _, m := range members {
		if m.Problem != "" {
			missing = append(missing, m.Name+": "+m.Problem)
			continue
		}
		signs[m.Held.Signs] = append(signs[m.Held.Signs], m.Name)
		old = m.Held.Signs
	}
	if len(missing) > 0 {
		return "", fmt.Errorf("every replica has to take part: %s", strings.Join(missing, "; "))
	}
	if len(signs) > 1 {
		var who []string
		for key, names := range signs {
			who = append(who, fmt.Sprintf("%s with %s", strings.Join(names, ", "), key))
		}
		slices.Sort(who)
		return "", fmt.Errorf("the replicas do not sign with one key (%s): end the exchange that was begun by hand first", strings.Join(who, "; "))
	}
	return old, nil
}

// Next is what the record becomes, and who or what it waits for as long as it stays. users are what is still good only
// by the former key, as a person knows it.
func Next(r Record, members []Member, users []string, now time.Time) (next Record, waiting []string) {
	next = r
	step := func(s Step) { next.Step, next.Since = s, now.UnixMilli() }
	switch r.Step {
	case Trust:
		// Nobody is left out here, forced or not: a replica that does not believe the new key is cut off by its use.
		waiting = lacking(members, false, func(h Held) string {
			if !slices.Contains(h.Believes, r.New) {
				return "has not taken the new key yet"
			}
			return ""
		})
		if len(waiting) == 0 {
			step(Use)
		}
	case Use:
		waiting = lacking(members, r.Force, func(h Held) string {
			if h.Signs != r.New {
				return "does not use the new key yet"
			}
			return ""
		})
		if len(waiting) == 0 {
			step(Wait)
			next.Sealed = nil
			next.Until = now.Add(time.Duration(r.Keep) * time.Second).UnixMilli()
		}
	case Wait:
		if !r.Force {
			if left := time.UnixMilli(r.Until).Sub(now); left > 0 {
				waiting = append(waiting, fmt.Sprintf("what was signed by the former key, until %s", time.UnixMilli(r.Until).UTC().Format(time.RFC3339)))
			}
			waiting = append(waiting, users...)
		}
		if len(waiting) == 0 {
			step(Forget)
		}
	case Forget:
		waiting = lacking(members, r.Force, func(h Held) string {
			if slices.Contains(h.Believes, r.Old) {
				return "has not given up the former key yet"
			}
			return ""
		})
		if len(waiting) == 0 {
			step(Done)
		}
	}
	return next, waiting
}

// Abort is the record of an exchange that is given up. After the new key has been used there is no way but forward.
func Abort(r Record, now time.Time) (Record, error) {
	switch {
	case !r.Active():
		return r, fmt.Errorf("no exchange is under way")
	case r.Step != Trust:
		return r, fmt.Errorf("the new key of %s is in use already (step %s): this exchange can only go on", r.Kind, r.Step)
	}
	r.Step, r.Since, r.Sealed = Aborted, now.UnixMilli(), nil
	return r, nil
}

func lacking(members []Member, leaveOut bool, judge func(Held) string) (waiting []string) {
	if len(members) == 0 {
		return []string{"no member is known"}
	}
	for _, m := range members {
		why := m.Problem
		if why == "" {
			why = judge(m.Held)
		} else if leaveOut {
			continue
		}
		if why != "" {
			waiting = append(waiting, m.Name+": "+why)
		}
	}
	return waiting
}
