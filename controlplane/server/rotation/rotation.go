// Package rotation says how a key that all replicas share gives way to a new one while they serve. It is pure: what is
// recorded and what the replicas have goes in, the next record and who is waited for comes out. So whoever leads goes on
// where the one before stopped: there is nothing to know but the record, which lies in the store, and what the replicas
// say of themselves.
//
//	trust ─▶ use ─▶ wait ─▶ forget ─▶ done
//	  │              └─▶ serve ─▲
//	  └────▶ aborted
//
//	trust    every replica takes the new key and believes it beside the former one
//	use      every replica signs, or seals, with the new key
//	wait     the former one is believed on, for what was signed by it
//	serve    of the cluster's CA: the API shows a certificate by the new one
//	forget   every replica gives up the former one
//
// A step begins when every member has said that it has done the one before: nobody meets a signature that it does not
// believe. Each step can be done again.
//
// The cluster's CA is believed by nodes and by clients, too. Every node has said that it believes the new one before
// anything is signed by it, and has certificates by it before the former one goes. Clients cannot be asked: until the step
// serve they meet the former one at the API, so that who knows that alone has the whole of the step wait to learn better.
package rotation

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Kind is what is exchanged.
type Kind string

// What can be exchanged.
const (
	ClusterCA         Kind = "cluster-ca"          // signs certificates of the API, of nodes and of users
	PeersCA           Kind = "peers-ca"            // the authority of the connections between replicas
	ServiceAccountKey Kind = "service-account-key" // signs the tokens of service accounts
	EncryptionKey     Kind = "encryption-key"      // under which each replica seals its disk
)

// Kinds are all of them.
func Kinds() []Kind { return []Kind{ClusterCA, PeersCA, ServiceAccountKey, EncryptionKey} }

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

// The steps, in order; Serve is one of ClusterCA alone, and Aborted comes after Trust, or whenever the exchange is of another
// time (OfAnotherTime).
const (
	Trust   Step = "trust"
	Use     Step = "use"
	Wait    Step = "wait"
	Serve   Step = "serve"
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
	// Believed orders what the cluster's CA was at different times: Since of the last step of its exchanges. It goes from
	// record to record.
	Believed int64 `json:"believedUnixMs,omitempty"`
	// Users are those whose certificates by the former CA were seen at the API, by the certificates' serial numbers.
	Users map[string]User `json:"users,omitempty"`
}

// User is whose client certificate was seen. Times are in milliseconds since 1970.
type User struct {
	Name string `json:"name"`
	Ends int64  `json:"endsUnixMs"`
	Seen int64  `json:"seenUnixMs"` // last, to within an eighth of Record.Keep
}

// Active says whether there is something left to do.
func (r Record) Active() bool { return r.Step != "" && r.Step != Done && r.Step != Aborted }

// Held is what a replica says it has of one kind. Ids of keys.
type Held struct {
	Signs    string
	Believes []string // Signs among them
	Serves   string   // of ClusterCA: by which the API's certificate is
}

// Member is a replica and what it has; Problem says why that is not known, or why it cannot take a key.
type Member struct {
	Name    string
	Problem string
	Held    Held
}

// Node is an agent and what it says of the cluster's CA; Problem says why that is not known.
type Node struct {
	Name     string
	Problem  string
	Believes []string
	Shows    []string // by which its own certificates are
}

// Seen is what there is besides the record.
type Seen struct {
	Members []Member
	Nodes   []Node   // all that there are; of ClusterCA alone
	Users   []string // what is still good only by the former key, as a person knows it
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

// Next is what the record becomes, and who or what it waits for as long as it stays.
func Next(r Record, see Seen, now time.Time) (next Record, waiting []string) {
	if r.OfAnotherTime(see.Members) {
		r = r.to(Aborted, now)
		r.Sealed, r.Users = nil, nil
		return r, nil
	}
	switch r.Step {
	case Trust:
		// No replica is left out here, forced or not: one that does not believe the new key is cut off by its use.
		waiting = append(lacking(see.Members, false, taken(r)), behind(see.Nodes, r.Force, believing(r))...)
	case Use:
		waiting = lacking(see.Members, r.Force, using(r))
	case Wait:
		if !r.Force {
			if left := time.UnixMilli(r.Until).Sub(now); left > 0 {
				waiting = append(waiting, fmt.Sprintf("what was signed by the former key, until %s", time.UnixMilli(r.Until).UTC().Format(time.RFC3339)))
			}
			waiting = append(waiting, see.Users...)
			if len(see.Members) > 0 { // one that is away is waited for at the step forget
				waiting = append(waiting, lacking(see.Members, true, having(r))...)
			}
		}
		waiting = append(waiting, behind(see.Nodes, r.Force, showing(r))...)
	case Serve:
		waiting = lacking(see.Members, r.Force, serving(r))
	case Forget:
		// A node that is away hears of it when it comes back.
		waiting = append(lacking(see.Members, r.Force, forgetting(r)), behind(see.Nodes, true, giving(r))...)
	default:
		return r, nil
	}
	if len(waiting) > 0 {
		return r, waiting
	}
	return r.to(after(r), now), nil
}

// Concerns says whether a replica that signs with this key can take part: with another one it is none of this exchange's, or
// the exchange is of another time.
func (r Record) Concerns(signs string) bool { return signs == "" || signs == r.Old || signs == r.New }

// OfAnotherTime says that an exchange under way is none of the keys that there are: a backup has brought it, and the key was
// exchanged again since the backup was made. Every member has to say so: nobody's key is touched by giving it up.
func (r Record) OfAnotherTime(members []Member) bool {
	return r.Active() && len(members) > 0 && !slices.ContainsFunc(members, func(m Member) bool { return r.Concerns(m.Held.Signs) })
}

// after is the step behind the one that is done.
func after(r Record) Step {
	switch {
	case r.Step == Wait && r.Kind == ClusterCA:
		return Serve
	case r.Step == Serve:
		return Forget
	}
	order := []Step{Trust, Use, Wait, Forget, Done}
	return order[slices.Index(order, r.Step)+1]
}

// to is the record at another step.
func (r Record) to(s Step, now time.Time) Record {
	r.Step, r.Since = s, max(now.UnixMilli(), r.Since+1) // clocks of leaders differ
	if r.Kind == ClusterCA {
		r.Believed = max(r.Since, r.Believed+1)
		r.Since = r.Believed
	}
	switch s {
	case Wait:
		r.Sealed = nil
		r.Until = now.Add(time.Duration(r.Keep) * time.Second).UnixMilli()
	case Serve, Forget:
		r.Users = nil
	}
	return r
}

func taken(r Record) func(Held) string {
	return func(h Held) string {
		return unless(slices.Contains(h.Believes, r.New), "has not taken the new key yet")
	}
}

func using(r Record) func(Held) string {
	return func(h Held) string { return unless(h.Signs == r.New, "does not use the new key yet") }
}

// having judges at the step wait, when the new key can be had by joining anew alone: the replica joined before the exchange
// and became a member after the step use.
func having(r Record) func(Held) string {
	return func(h Held) string {
		return unless(h.Signs == r.New, "has not got the new key: move its data folder aside and 'keelson-controlplane join' it anew")
	}
}

func serving(r Record) func(Held) string {
	return func(h Held) string {
		return unless(h.Serves == r.New, "does not show the new certificate at the API yet")
	}
}

func forgetting(r Record) func(Held) string {
	return func(h Held) string {
		return unless(!slices.Contains(h.Believes, r.Old), "has not given up the former key yet")
	}
}

func believing(r Record) func(Node) string {
	return func(n Node) string {
		return unless(slices.Contains(n.Believes, r.New), "does not believe the new CA yet")
	}
}

func showing(r Record) func(Node) string {
	return func(n Node) string {
		return unless(!slices.Contains(n.Shows, r.Old), "has a certificate by the former CA still")
	}
}

func giving(r Record) func(Node) string {
	return func(n Node) string {
		return unless(!slices.Contains(n.Believes, r.Old), "has not given up the former CA yet")
	}
}

func unless(good bool, why string) string {
	if good {
		return ""
	}
	return why
}

// Abort is the record of an exchange that is given up. After the new key has been used there is no way but forward.
func Abort(r Record, now time.Time) (Record, error) {
	switch {
	case !r.Active():
		return r, fmt.Errorf("no exchange is under way")
	case r.Step != Trust:
		return r, fmt.Errorf("the new key of %s is in use already (step %s): this exchange can only go on", r.Kind, r.Step)
	}
	r = r.to(Aborted, now)
	r.Sealed = nil
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

// behind are the nodes that judge says something of. Those of which nothing is known are left out on demand: a node that
// does not believe the new CA when it is used has to be enrolled anew.
func behind(nodes []Node, leaveOut bool, judge func(Node) string) (waiting []string) {
	for _, n := range nodes {
		why := n.Problem
		if why == "" {
			why = judge(n)
		} else if leaveOut {
			continue
		}
		if why != "" {
			waiting = append(waiting, "node "+n.Name+": "+why)
		}
	}
	return waiting
}

// Note is the record with users whose certificates were seen, and whether it is another one. Of a certificate that is
// known it becomes another only now and then, for every change is written.
func (r Record) Note(seen map[string]User) (next Record, changed bool) {
	next = r
	grain := r.Keep * 1000 / 8
	for serial, u := range seen {
		was, known := next.Users[serial]
		if known && u.Seen < was.Seen+grain+1 || !known && len(next.Users) >= maxUsers {
			continue
		}
		if !changed {
			next.Users, changed = maps.Clone(next.Users), true
			if next.Users == nil {
				next.Users = map[string]User{}
			}
		}
		next.Users[serial] = u
	}
	return next, changed
}

// maxUsers bounds the record.
const maxUsers = 256

// UsersOfFormer are those of the record whose certificates by the former CA are good and were used in the time for which
// that is to be kept, the one that ends last behind.
func (r Record) UsersOfFormer(now time.Time) (out []User) {
	for _, u := range r.Users {
		if now.UnixMilli() < u.Ends && now.UnixMilli() < u.Seen+r.Keep*1000 {
			out = append(out, u)
		}
	}
	slices.SortFunc(out, func(a, b User) int { return cmp.Or(cmp.Compare(a.Ends, b.Ends), cmp.Compare(a.Name, b.Name)) })
	return out
}
