package replica

import (
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// raft tells of its changes of role, and why, in its log only. overheard passes
// the log on and makes one line of each change: from, to, and the reason.
type overheard struct {
	hclog.Logger
	roles *roleLog
}

func (o *overheard) Debug(msg string, args ...any) {
	o.roles.hear(msg, args)
	o.Logger.Debug(msg, args...)
}
func (o *overheard) Info(msg string, args ...any) {
	o.roles.hear(msg, args)
	o.Logger.Info(msg, args...)
}
func (o *overheard) Warn(msg string, args ...any) {
	o.roles.hear(msg, args)
	o.Logger.Warn(msg, args...)
}
func (o *overheard) Error(msg string, args ...any) {
	o.roles.hear(msg, args)
	o.Logger.Error(msg, args...)
}

// roleLog remembers the role and what was last heard of why it may change.
type roleLog struct {
	changed func(from, to, reason string)

	mu     sync.Mutex
	role   string
	reason string
	heard  time.Time // when the reason was
}

// staleReason is how old a reason may be and still explain a change: what was
// to make one and did not, such as a hand-over that failed, is forgotten.
const staleReason = 3 * time.Second

// entering are raft's words for a new role.
var entering = map[string]raft.RaftState{
	"entering follower state":  raft.Follower,
	"entering candidate state": raft.Candidate,
	"entering leader state":    raft.Leader,
}

// reason says for one message of raft's what makes it change its role.
type reason struct {
	text    string // ours; %v is the value of the key
	key     string
	without string // the text when the value is missing
	deposes bool   // means something to a leader or candidate only
}

var reasons = map[string]reason{
	"failed to contact quorum of nodes, stepping down":                 {text: "lease lost: no majority answered in time"},
	"peer has newer term, stopping replication":                        {text: "higher term from %v", key: "peer"},
	"lost leadership because received a requestVote with a newer term": {text: "higher term from a candidate", deposes: true},
	"new leader elected, stepping down":                                {text: "another leader was elected"},
	"starting leadership transfer":                                     {text: "stepping down on request: handing over to %v", key: "id", without: "stepping down on request"},
	"removed ourself, transitioning to follower":                       {text: "removed from the group"},
	"heartbeat timeout reached, starting election":                     {text: "leader %v is silent", key: "last-leader-id", without: "no leader is known"},
	"Election timeout reached, restarting election":                    {text: "nobody was elected in time"},
	"newer term discovered, fallback to follower":                      {text: "higher term %v found in the election", key: "term"},
	"pre-vote denied: found newer term, falling back to follower":      {text: "higher term %v found before the election", key: "term"},
	"election won": {text: "elected in term %v", key: "term"},
}

func (l *roleLog) hear(msg string, args []any) {
	if r, known := reasons[msg]; known {
		text := r.text
		if r.key != "" {
			if v := named(args, r.key); v != "" {
				text = fmt.Sprintf(r.text, v)
			} else {
				text = r.without
			}
		}
		l.mu.Lock()
		if r.deposes && l.role == roleName(raft.Follower) {
			text = l.reason // it changes nothing for a follower
		}
		// The first is the cause, what follows on the way comes of it: a new
		// term after a hand-over. An election that is won has ended its own cause.
		if l.reason == "" || l.role == roleName(raft.Candidate) || time.Since(l.heard) > staleReason {
			l.reason, l.heard = text, time.Now()
		}
		l.mu.Unlock()
		return
	}
	state, known := entering[msg]
	if !known {
		return
	}
	l.mu.Lock()
	from, reason := l.role, l.reason
	if time.Since(l.heard) > staleReason {
		reason = ""
	}
	l.role, l.reason = roleName(state), ""
	to := l.role
	l.mu.Unlock()
	if leader := named(args, "leader-id"); reason == "" && leader != "" {
		reason = leader + " leads"
	}
	switch {
	case from == "":
		from, reason = "none", "started"
	case reason == "" && from == roleName(raft.Candidate):
		reason = "another was elected"
	case reason == "" && to == roleName(raft.Candidate):
		reason = "the leader hands over"
	case reason == "":
		reason = "raft gave none"
	}
	l.changed(from, to, reason)
}

// named finds a value among arguments that alternate with their names; "" when
// it is missing or none.
func named(args []any, key string) string {
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] != key {
			continue
		}
		switch v := args[i+1].(type) {
		case nil:
			return ""
		case *raft.ServerID: // of a transfer, which need not say to whom
			if v == nil {
				return ""
			}
			return string(*v)
		default:
			return fmt.Sprint(v)
		}
	}
	return ""
}

func roleName(s raft.RaftState) string {
	switch s {
	case raft.Leader:
		return "leader"
	case raft.Candidate:
		return "candidate"
	default:
		return "follower"
	}
}

// stop tells of the end of the last role.
func (l *roleLog) stop(cause error) {
	l.mu.Lock()
	from := l.role
	l.role = ""
	l.mu.Unlock()
	if from == "" {
		return // raft never came up
	}
	reason := "asked to stop"
	if cause != nil {
		reason = cause.Error()
	}
	l.changed(from, "none", reason)
}

// overhear makes raft's logger one that tells of changes of role.
func (r *Replica) overhear(l hclog.Logger) hclog.Logger {
	r.roles.changed = func(from, to, reason string) {
		if to == roleName(raft.Candidate) {
			r.meters.elections.Add(1)
		}
		r.log.Info("role changed", "from", from, "to", to, "reason", reason)
	}
	return &overheard{Logger: l, roles: &r.roles}
}
