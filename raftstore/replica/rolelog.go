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

// reasons are raft's words for what makes it change its role, and ours. %v is
// the value of the key.
var reasons = map[string]struct{ text, key string }{
	"failed to contact quorum of nodes, stepping down":                 {"lease lost: no majority answered in time", ""},
	"peer has newer term, stopping replication":                        {"higher term from %v", "peer"},
	"lost leadership because received a requestVote with a newer term": {"higher term from a candidate", ""},
	"new leader elected, stepping down":                                {"another leader was elected", ""},
	"starting leadership transfer":                                     {"stepping down on request: handing over to %v", "id"},
	"removed ourself, transitioning to follower":                       {"removed from the group", ""},
	"heartbeat timeout reached, starting election":                     {"leader %v is silent", "last-leader-id"},
	"Election timeout reached, restarting election":                    {"nobody was elected in time", ""},
	"newer term discovered, fallback to follower":                      {"higher term %v found in the election", "term"},
	"pre-vote denied: found newer term, falling back to follower":      {"higher term %v found before the election", "term"},
	"election won": {"elected in term %v", "term"},
}

func (l *roleLog) hear(msg string, args []any) {
	if r, known := reasons[msg]; known {
		text := r.text
		if r.key != "" {
			text = fmt.Sprintf(r.text, named(args, r.key))
		}
		l.mu.Lock()
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
	if leader := named(args, "leader-id"); reason == "" && leader != nil && fmt.Sprint(leader) != "" {
		reason = fmt.Sprintf("%v leads", leader)
	}
	switch {
	case from == "":
		from, reason = "none", "started"
	case reason == "" && from == roleName(raft.Candidate):
		reason = "another was elected"
	case reason == "":
		reason = "raft gave none"
	}
	l.changed(from, to, reason)
}

// named finds a value among arguments that alternate with their names.
func named(args []any, key string) any {
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == key {
			return args[i+1]
		}
	}
	return nil
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

// overhear makes raft's logger one that tells of changes of role.
func (r *Replica) overhear(l hclog.Logger) hclog.Logger {
	return &overheard{Logger: l, roles: &roleLog{changed: func(from, to, reason string) {
		if to == roleName(raft.Candidate) {
			r.meters.elections.Add(1)
		}
		r.log.Info("role changed", "from", from, "to", to, "reason", reason)
	}}}
}
