// Package rotation decides the steps of the rotation of a key that all replicas share. The replicas
// continue to serve during the rotation. The package consists of pure functions. Their inputs are
// the stored record and the keys that the replicas report; their outputs are the next record and
// the reasons for waiting. A new leader therefore continues where the previous leader stopped: it
// needs only the record and the reports.
//
//	trust ─▶ use ─▶ wait ─▶ forget ─▶ done
//	  │              └─▶ serve ─▲
//	  └────▶ aborted
//
//	trust    every replica receives the new key and trusts it in addition to the old key
//	use      every replica signs, or encrypts, with the new key
//	wait     the old key stays trusted, for everything that it has signed
//	serve    only for the cluster CA: the API uses a certificate that the new CA has signed
//	forget   every replica stops trusting the old key
//
// A step starts when every member has reported that it has completed the previous step. So no
// replica receives a signature of a key that it does not trust. Each step is idempotent.
//
// Nodes and clients trust the cluster CA too. Nothing is signed with the new CA before every node
// has reported that it trusts that CA. The old CA is removed only when every node has certificates
// of the new CA. Clients do not report. The API uses the old certificate until the step serve. So
// clients that trust only the old CA can read the new CA during the whole step wait.
package rotation

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Kind is the kind of a shared key.
type Kind string

// The kinds of keys that can be rotated.
const (
	ClusterCA         Kind = "cluster-ca"          // signs certificates of the API, of nodes and of users
	PeersCA           Kind = "peers-ca"            // signs the certificates of connections between replicas
	ServiceAccountKey Kind = "service-account-key" // signs the tokens of service accounts
	EncryptionKey     Kind = "encryption-key"      // encrypts the store of each replica on disk
)

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{ClusterCA, PeersCA, ServiceAccountKey, EncryptionKey} }

// ParseKind parses a kind. Its error lists the valid kinds.
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

// Step is a step of a rotation: trust, use, wait, serve or forget. When the rotation has ended, it
// is done or aborted.
type Step string

// The steps, in order. Only a rotation of ClusterCA has the step Serve. A rotation can be aborted
// in the step Trust. A rotation that a restored backup contains can be aborted in any step.
const (
	Trust   Step = "trust"
	Use     Step = "use"
	Wait    Step = "wait"
	Serve   Step = "serve"
	Forget  Step = "forget"
	Done    Step = "done"
	Aborted Step = "aborted"
)

// Version is the version of a Record. Later releases may add fields, which this release ignores. A
// Record with a higher version is not changed.
const Version = 1

// Record is the stored state of a rotation. There is one record per cluster: the current or the
// last rotation. Times are in milliseconds since 1970.
type Record struct {
	Version int    `json:"version"`
	ID      string `json:"id"` // random and unique
	Kind    Kind   `json:"kind"`
	New     string `json:"new"` // ID of the new key
	Old     string `json:"old"`
	Step    Step   `json:"step"`
	// Sealed is the new key, encrypted so that only replicas can decrypt it. It is deleted once all
	// replicas sign with it.
	Sealed  []byte `json:"sealed,omitempty"`
	By      string `json:"by,omitempty"` // user name of the requester
	Started int64  `json:"startedUnixMs"`
	Since   int64  `json:"sinceUnixMs"`           // start of the step
	Keep    int64  `json:"keepSeconds,omitempty"` // how long the old key is trusted after the new key signs
	Until   int64  `json:"untilUnixMs,omitempty"` // end of that time; set in the step wait
	// Force continues without members and nodes that do not respond, and without waiting for the
	// time Keep. The step trust waits for all members even with Force.
	Force bool `json:"force,omitempty"`
	// TrustOrder is a number that grows with every step of a rotation of the cluster CA. Agents and
	// replicas use it to ignore sets of trusted CAs that are older than their own. A new record
	// starts with the value of the previous record.
	TrustOrder int64 `json:"believedUnixMs,omitempty"`
	// Users are the users that have connected to the API with certificates of the old CA, by the
	// serial number of the certificate.
	Users map[string]User `json:"users,omitempty"`
}

// User is a user whose client certificate of the old CA was observed. Times are in milliseconds
// since
// 1970.
type User struct {
	Name     string `json:"name"`
	Expires  int64  `json:"endsUnixMs"`
	LastUsed int64  `json:"seenUnixMs"` // last use, with a precision of an eighth of Record.Keep
}

// Active reports whether the rotation is in progress.
func (r Record) Active() bool { return r.Step != "" && r.Step != Done && r.Step != Aborted }

// KeyIDs are the IDs of a replica's keys of one kind.
type KeyIDs struct {
	Signing string
	Trusted []string // includes Signing
	Serving string   // only for ClusterCA: the CA of the API's certificate
}

// Member is a replica and the IDs of its keys. Problem is the reason why the keys are unknown, or
// why the replica cannot take part in a rotation. It is empty if there is no such reason.
type Member struct {
	Name    string
	Problem string
	Keys    KeyIDs
}

// Node is a node and the IDs of the cluster CAs that its agent trusts. Problem is the reason why
// these CAs are unknown, and empty if they are known.
type Node struct {
	Name      string
	Problem   string
	Trusted   []string
	Presented []string // the CAs that signed its certificates
}

// ClusterState is the observed state of the cluster on which the next step depends.
type ClusterState struct {
	Members []Member
	Nodes   []Node   // all nodes; only for ClusterCA
	Users   []string // descriptions of users that still need the old key
}

// CheckStart checks whether a rotation can start, and returns the ID of the key with which all
// members currently sign. It returns an error if another rotation is in progress, if a member does
// not respond or cannot take part, or if the members sign with different keys.
func CheckStart(current Record, members []Member) (old string, err error) {
	if current.Active() {
		return "", fmt.Errorf("a rotation of %s is in progress, at step %s: only one rotation can run at a time",
			current.Kind, current.Step)
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
		signs[m.Keys.Signing] = append(signs[m.Keys.Signing], m.Name)
		old = m.Keys.Signing
	}
	if len(missing) > 0 {
		return "", fmt.Errorf("every replica must take part: %s", strings.Join(missing, "; "))
	}
	if len(signs) > 1 {
		var groups []string
		for key, names := range signs {
			groups = append(groups, fmt.Sprintf("%s with %s", strings.Join(names, ", "), key))
		}
		slices.Sort(groups)
		return "",
			fmt.Errorf("the replicas do not sign with the same key (%s): first complete the rotation that was "+
				"started by hand",
				strings.Join(groups, "; "))
	}
	return old, nil
}

// Next returns the record of the next step, which starts at now. If a condition for that step is
// not met, it returns r unchanged and the reasons for waiting. If the rotation applies to no
// member, it returns the aborted rotation.
func Next(r Record, observed ClusterState, now time.Time) (next Record, waiting []string) {
	if r.IsUnrelated(observed.Members) {
		r = r.atStep(Aborted, now)
		r.Sealed, r.Users = nil, nil
		return r, nil
	}
	switch r.Step {
	case Trust:
		// No member is skipped in this step, not even with Force. A member that does not trust the
		// new key could not communicate with the others once they use it.
		waiting = append(waitingMembers(observed.Members, false, requireNewKeyTrusted(r)),
			waitingNodes(observed.Nodes, r.Force, requireNodeTrust(r))...)
	case Use:
		waiting = waitingMembers(observed.Members, r.Force, requireNewKeySigns(r))
	case Wait:
		if !r.Force {
			if left := time.UnixMilli(r.Until).Sub(now); left > 0 {
				waiting = append(waiting, fmt.Sprintf("signatures of the previous key, which stay valid until %s",
					time.UnixMilli(r.Until).UTC().Format(time.RFC3339)))
			}
			waiting = append(waiting, observed.Users...)
			if len(observed.Members) > 0 { // the step forget waits for members that do not respond
				waiting = append(waiting, waitingMembers(observed.Members, true, requireNewKeyHeld(r))...)
			}
		}
		waiting = append(waiting, waitingNodes(observed.Nodes, r.Force, requireNodeCertificates(r))...)
	case Serve:
		waiting = waitingMembers(observed.Members, r.Force, requireNewCAServed(r))
	case Forget:
		// Nodes that do not respond are skipped: they receive the current CAs when they reconnect.
		waiting = append(waitingMembers(observed.Members, r.Force, requireOldKeyRemoved(r)),
			waitingNodes(observed.Nodes, true, requireNodeRemoval(r))...)
	default:
		return r, nil
	}
	if len(waiting) > 0 {
		return r, waiting
	}
	return r.atStep(stepAfter(r), now), nil
}

// AppliesTo reports whether the rotation applies to a replica whose signing key has this ID: it is
// the ID of the old or the new key, or empty, because the signing key is unknown.
func (r Record) AppliesTo(signingKey string) bool {
	return signingKey == "" || signingKey == r.Old || signingKey == r.New
}

// IsUnrelated reports whether an active rotation applies to no member. This happens after a
// restore: the backup contains the record, and the key was rotated again after the backup was made.
// Aborting the rotation then changes no key.
func (r Record) IsUnrelated(members []Member) bool {
	return r.Active() && len(members) > 0 && !slices.ContainsFunc(members, func(m Member) bool {
		return r.AppliesTo(m.Keys.Signing)
	})
}

// stepAfter returns the step that follows the step of r.
func stepAfter(r Record) Step {
	switch {
	case r.Step == Wait && r.Kind == ClusterCA:
		return Serve
	case r.Step == Serve:
		return Forget
	}
	order := []Step{Trust, Use, Wait, Forget, Done}
	return order[slices.Index(order, r.Step)+1]
}

// atStep returns the record at step s, which starts at now.
func (r Record) atStep(s Step, now time.Time) Record {
	r.Step, r.Since = s, max(now.UnixMilli(), r.Since+1) // grows even if the clock of the new leader is behind
	if r.Kind == ClusterCA {
		r.TrustOrder = max(r.Since, r.TrustOrder+1)
		r.Since = r.TrustOrder
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

func requireNewKeyTrusted(r Record) func(KeyIDs) string {
	return func(h KeyIDs) string {
		return reasonUnless(slices.Contains(h.Trusted, r.New), "has not received the new key yet")
	}
}

func requireNewKeySigns(r Record) func(KeyIDs) string {
	return func(h KeyIDs) string { return reasonUnless(h.Signing == r.New, "does not use the new key yet") }
}

// requireNewKeyHeld returns a check for the step wait: the member must sign with the new key. A
// replica that received its keys before the rotation and became a member after the step use fails
// the check. It can get the new key only by joining again.
func requireNewKeyHeld(r Record) func(KeyIDs) string {
	return func(h KeyIDs) string {
		return reasonUnless(h.Signing == r.New,
			"does not have the new key: move its data directory aside and join it again with "+
				"'keelson-controlplane join'")
	}
}

func requireNewCAServed(r Record) func(KeyIDs) string {
	return func(h KeyIDs) string {
		return reasonUnless(h.Serving == r.New, "does not present the new certificate at the API yet")
	}
}

func requireOldKeyRemoved(r Record) func(KeyIDs) string {
	return func(h KeyIDs) string {
		return reasonUnless(!slices.Contains(h.Trusted, r.Old), "still trusts the previous key")
	}
}

func requireNodeTrust(r Record) func(Node) string {
	return func(n Node) string {
		return reasonUnless(slices.Contains(n.Trusted, r.New), "does not trust the new CA yet")
	}
}

func requireNodeCertificates(r Record) func(Node) string {
	return func(n Node) string {
		return reasonUnless(!slices.Contains(n.Presented, r.Old), "still has a certificate of the previous CA")
	}
}

func requireNodeRemoval(r Record) func(Node) string {
	return func(n Node) string {
		return reasonUnless(!slices.Contains(n.Trusted, r.Old), "still trusts the previous CA")
	}
}

func reasonUnless(ok bool, reason string) string {
	if ok {
		return ""
	}
	return reason
}

// Abort returns the record of the aborted rotation. After the step trust it returns an error,
// because the new key is then in use.
func Abort(r Record, now time.Time) (Record, error) {
	switch {
	case !r.Active():
		return r, fmt.Errorf("no rotation is in progress")
	case r.Step != Trust:
		return r, fmt.Errorf("the new key of %s is already in use (step %s): the rotation cannot be aborted",
			r.Kind, r.Step)
	}
	r = r.atStep(Aborted, now)
	r.Sealed = nil
	return r, nil
}

func waitingMembers(members []Member, skipFailed bool, check func(KeyIDs) string) (waiting []string) {
	if len(members) == 0 {
		return []string{"no member is known"}
	}
	for _, m := range members {
		reason := m.Problem
		if reason == "" {
			reason = check(m.Keys)
		} else if skipFailed {
			continue
		}
		if reason != "" {
			waiting = append(waiting, m.Name+": "+reason)
		}
	}
	return waiting
}

// waitingNodes returns the reasons for which the rotation waits for nodes. check returns the reason
// for one node, or "". With skipFailed, nodes with a problem are skipped. Such a node must enroll
// again if it does not trust the new CA when that CA is used.
func waitingNodes(nodes []Node, skipFailed bool, check func(Node) string) (waiting []string) {
	for _, n := range nodes {
		reason := n.Problem
		if reason == "" {
			reason = check(n)
		} else if skipFailed {
			continue
		}
		if reason != "" {
			waiting = append(waiting, "node "+n.Name+": "+reason)
		}
	}
	return waiting
}

// AddUsers returns the record with the users in observed, which maps the serial numbers of
// certificates to users. changed is true if the record has changed. The last use of a recorded
// certificate is updated only at intervals, because every change is written to the store.
func (r Record) AddUsers(observed map[string]User) (next Record, changed bool) {
	next = r
	interval := r.Keep * 1000 / 8
	for serial, u := range observed {
		was, known := next.Users[serial]
		if known && u.LastUsed < was.LastUsed+interval+1 || !known && len(next.Users) >= maxUsers {
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

// maxUsers is the maximum number of users of the old CA in a record.
const maxUsers = 256

// UsersOfOldCA returns the users whose certificates of the old CA are valid and were used within
// the last r.Keep seconds, sorted by the expiry of the certificate.
func (r Record) UsersOfOldCA(now time.Time) (out []User) {
	for _, u := range r.Users {
		if now.UnixMilli() < u.Expires && now.UnixMilli() < u.LastUsed+r.Keep*1000 {
			out = append(out, u)
		}
	}
	slices.SortFunc(out, func(a, b User) int {
		return cmp.Or(cmp.Compare(a.Expires, b.Expires), cmp.Compare(a.Name, b.Name))
	})
	return out
}
